"""Where a step's seconds go: rollout, reward, anchor, update; which rank is slow; and where a rank is stuck."""

import faulthandler
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn

from hyvideo.distributed.hangs import RollCall

PHASES = ("rollout", "reward", "anchor", "update")
BETWEEN = "between phases (validation, saving, logging)"


class PhaseTimer:
    """Adds up wall-clock seconds per phase; on a GPU it waits for the device, so a phase pays for its own kernels.

    `phase` names what is going on (`BETWEEN` outside all blocks), `since` when that began (`time.monotonic`): what a
    watchdog or an error message asks for. `around` makes a context for each phase, which a profiler replaces.

    Ranks that wait for each other have equally long phases. So it also adds up a rank's own work: blocks (`own`) and
    modules (`follow`) in which there is no collective.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.around: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._own: list[tuple[str, int, _Mark, _Mark]] = []
        self.phase = BETWEEN
        self.since = time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the duration of the `with` block to `phase`; where it fails, `self.phase` goes on naming it."""
        self.phase, self.since = phase, time.monotonic()
        start = clock(self.device)
        with self.around(phase):
            try:
                yield
            finally:
                self._seconds[phase] += clock(self.device) - start
        self.phase, self.since = BETWEEN, time.monotonic()

    def pop(self) -> dict[str, float]:
        """Seconds per phase since the last pop, as `{"time/<phase>": seconds}` for every phase; starts again at 0."""
        seconds = {f"time/{phase}": value for phase, value in self._seconds.items()}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return seconds

    @contextmanager
    def own(self) -> Iterator[None]:
        """Count the `with` block as this rank's own work in the phase that it lies in."""
        start = _mark(self.device)
        yield
        self._add_own(1, start)

    def follow(self, module: nn.Module, times: int = 1) -> None:
        """Count each forward pass of `module` as own work, `times` over: it stands for as many modules like it.

        Sharded weights are gathered before that, because FSDP's hooks are around these. On a GPU a pass costs two
        events; nothing waits for them until `pop_own`.
        """
        begun: list[_Mark] = []
        module.register_forward_pre_hook(lambda *call: begun.append(_mark(self.device)))
        module.register_forward_hook(lambda *call: self._add_own(times, begun.pop()))

    def pop_own(self) -> dict[str, float]:
        """Return the seconds of own work per phase since the last pop, once the device has finished it."""
        clock(self.device)
        seconds = dict.fromkeys(PHASES, 0.0)
        for phase, times, start, end in self._own:
            seconds[phase] += times * (end - start if isinstance(end, float) else start.elapsed_time(end) / 1000)
        self._own.clear()
        return seconds

    def _add_own(self, times: int, start: "_Mark") -> None:
        if self.phase in PHASES:  # validations are sampled between them
            self._own.append((self.phase, times, start, _mark(self.device)))


_Mark = float | torch.cuda.Event


def _mark(device: torch.device) -> _Mark:
    """Mark this moment: on a GPU when it gets there, elsewhere now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def clock(device: torch.device) -> float:
    """Return the seconds of a clock when `device` has finished what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


SLOW = 1.2
"""Times the median rank's own work, above which a rank is a straggler."""

SLOW_ROUNDS = 5
"""Rounds in a row in which it must be."""


class StragglerWatch:
    """Compares the ranks' own work of each round, and remembers which were slow in the rounds before.

    Attributes:
        slowest: the last round's slowest rank in words, such as `rank 3 on gpu-b, 1.31 x the median`; empty before.
    """

    def __init__(self) -> None:
        self.slowest = ""
        self._streaks: Counter[int] = Counter()

    def observe(self, hosts: Sequence[str], own: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], list[str]]:
        """Take every rank's host and seconds of own work by phase; return what a round logs, and warnings.

        A phase in which a rank has nothing to do is absent, and counts as the median of the others. A rank that was
        above `SLOW` in `SLOW_ROUNDS` rounds in a row is warned of once, until it is faster again. Where no work was
        measured, nothing is returned.
        """
        usual = {phase: median(each[phase] for each in own if phase in each) for phase in set().union(*own)}
        own = [usual | seconds for seconds in own]
        totals = [sum(seconds.values()) for seconds in own]
        middle = median(totals)
        if not middle:
            return {}, []
        slowest = max(range(len(totals)), key=totals.__getitem__)
        ratio = totals[slowest] / middle
        self.slowest = f"rank {slowest} on {hosts[slowest]}, {ratio:.2f} x the median"
        self._streaks = Counter({r: self._streaks[r] + 1 for r, t in enumerate(totals) if t > SLOW * middle})
        warnings = []
        for rank in (rank for rank, rounds in self._streaks.items() if rounds == SLOW_ROUNDS):
            extra = {phase: seconds - usual[phase] for phase, seconds in own[rank].items()}
            warnings.append(
                f"Rank {rank} on {hosts[rank]} is slow, and all others wait for it: in {SLOW_ROUNDS} rounds in a row "
                f"its work took more than {SLOW:g} times the median, now {totals[rank]:.3g} instead of {middle:.3g} s, "
                f"most of the difference in phase '{max(extra, key=extra.get)}'. Look at its GPU's clocks and "
                "temperature (`nvidia-smi -q -d PERFORMANCE`) and for other programs there, or leave that machine out."
            )
        return {"perf/slowest_rank": slowest, "perf/slowest_ratio": ratio}, warnings


class Watchdog:
    """Says where a rank is stuck while it is stuck, from a thread of its own: its phase, and what its threads do.

    Every rank has one. A rank that waits for others in a collective is stuck as well. So after `seconds` in one phase,
    and again after as many, it prints its stacks and has all watchdogs asked; the first rank then tells by `tell` which
    collective is waited for, and which ranks did not come. The output must be a real file, because stacks are written
    to its descriptor.
    """

    def __init__(self, timer: PhaseTimer, *, rank: int, seconds: float, output: TextIO | None = None) -> None:
        self._timer = timer
        self._rank = rank
        self.seconds = seconds
        self._output = output or sys.stderr
        self.tell: Callable[[str], None] = self._print
        self._ended = threading.Event()
        self._roll_call: RollCall | None = None

    def __enter__(self) -> "Watchdog":
        """Start to watch."""
        self._ended.clear()
        self._roll_call = RollCall() if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop; a thread that waits for the store of a rank that stands still is left behind."""
        self._ended.set()
        self._thread.join(self._pause())

    def _watch(self) -> None:
        since, told = self._timer.since, 0
        while not self._ended.wait(self._pause()):
            if self._timer.since != since:
                since, told = self._timer.since, 0
            stuck = time.monotonic() - since >= self.seconds * (told + 1)
            if stuck:
                told += 1
                self._print(f"rank {self._rank}: {self._where()}; stacks of its threads, the innermost call first:")
                faulthandler.dump_traceback(self._output, all_threads=True)
            try:  # ask if this rank is stuck, and answer if any rank has asked
                if self._roll_call and stuck:
                    self._roll_call.ask()
                asked = self._roll_call and self._roll_call.answer(self._where())
                if asked and not self._ended.wait(2 * self._pause()) and (summary := self._roll_call.summary()):
                    self.tell(summary)
            except RuntimeError as error:  # the store is gone, and the run with it
                self._roll_call = None
                if stuck:
                    self._print(f"rank {self._rank}: the other ranks cannot be asked where they are: {error}")

    def _pause(self) -> float:
        """Seconds between two looks."""
        return min(self.seconds / 4, 10.0)

    def _where(self) -> str:
        return f"{time.monotonic() - self._timer.since:.0f} s in phase '{self._timer.phase}'"

    def _print(self, message: str) -> None:
        print(f"WARNING: {message}", file=self._output, flush=True)
