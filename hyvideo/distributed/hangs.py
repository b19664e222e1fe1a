"""Find out in a run that hangs which collective it waits for, and which ranks did not come."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as recorders
from torch.distributed import Store

_KEY = "roll_call"
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""PyTorch's flight recorders: of gloo, and of NCCL, which exists only where PyTorch was built for GPUs."""


@dataclass(frozen=True)
class Wait:
    """A collective that a rank has begun and not finished: its number in its group, the ranks of that, and seconds."""

    name: str
    number: int
    ranks: Sequence[int]
    seconds: float


@dataclass(frozen=True)
class Answer:
    """Where a rank is, in words; the number of its last collective and what it waits for, by group."""

    where: str
    last: Mapping[str, int]
    waits: Mapping[str, Wait]


def answer_of_this_rank(where: str) -> Answer:
    """Read from PyTorch's flight recorders in which collectives this rank is."""
    last: dict[str, int] = {}
    waits: dict[str, Wait] = {}
    for recorder in filter(None, (getattr(recorders, name, None) for name in _RECORDERS)):
        for entry in json.loads(recorder()).get("entries", ()):
            if entry["is_p2p"]:
                continue
            name, group, number = entry["profiling_name"], entry["process_group"][0], entry["collective_seq_id"]
            key = f"{name.partition(':')[0]} {group}"
            last[key] = max(number, last.get(key, 0))
            if not entry["retired"] and key not in waits:  # entries come in the order in which they were begun
                ranks = dist.get_process_group_ranks(recorders._resolve_process_group(group))
                waits[key] = Wait(name, number, ranks, time.time() - entry["time_created_ns"] / 1e9)
    return Answer(where, last, waits)


class RollCall:
    """Asks the watchdogs of all ranks where they are, over the store by which the ranks met: no collective is needed.

    A rank whose process is stopped or dead does not answer. Of those that do, the first one sums up.
    """

    def __init__(self) -> None:
        self._store: Store = dist.distributed_c10d._get_default_store().clone()  # another thread may wait in that one
        self._answered = self._store.add(_KEY, 0)

    def ask(self) -> None:
        """Ask all ranks, unless one has already."""
        self._store.compare_set(_KEY, str(self._answered), str(self._answered + 1))

    def is_asked(self) -> bool:
        """Whether a rank has asked for an answer that this one has not given."""
        return self._store.add(_KEY, 0) > self._answered

    def answer(self, where: str) -> None:
        """Answer with the collectives that this rank is in, and `where` it is, in words."""
        self._answered = self._store.add(_KEY, 0)
        self._store.set(self._place(dist.get_rank()), json.dumps(answer_of_this_rank(where), default=vars))

    def summary(self) -> str | None:
        """Sum up the answers to the last question; None on all ranks but the first that answered."""
        if any(self._store.check([self._place(rank)]) for rank in range(dist.get_rank())):
            return None
        places = {rank: self._place(rank) for rank in range(dist.get_world_size())}
        told = {
            rank: json.loads(self._store.get(place)) for rank, place in places.items() if self._store.check([place])
        }
        return summary_of({rank: _answer(fields) for rank, fields in told.items()})

    def _place(self, rank: int) -> str:
        return f"{_KEY}/{self._answered}/{rank}"


def _answer(fields: Mapping[str, Any]) -> Answer:
    return Answer(fields["where"], fields["last"], {key: Wait(**wait) for key, wait in fields["waits"].items()})


def summary_of(answers: Mapping[int, Answer]) -> str:
    """Say for every collective that a rank waits in who did not come, and where those are; `answers` by rank."""
    found: dict[tuple[str, int], Wait] = {}
    for answer in answers.values():
        for group, wait in answer.waits.items():
            found.setdefault((group, wait.number), wait)
    told = []
    for (group, number), wait in found.items():
        missing = [rank for rank in wait.ranks if rank not in answers or answers[rank].last.get(group, 0) < number]
        who = [f"rank {rank} ({answers[rank].where if rank in answers else 'silent'})" for rank in missing[:8]]
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        told.append(
            f"{wait.name}, collective {number} of {len(wait.ranks)} ranks, waits for {wait.seconds:.0f} s: "
            + (f"{', '.join(who)}{more} did not come" if who else "all ranks came, so look at the network or the GPUs")
        )
    return f"The run hangs. {'; '.join(told)}." if told else "The run is slow, but no rank waits in a collective."
