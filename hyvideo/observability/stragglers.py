"""Find the rank that the others wait for: the one whose own work takes longest."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

LIMIT = 1.2
"""Times the median rank's own work, above which a rank is a straggler."""

ROUNDS = 5
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
        above `LIMIT` in `ROUNDS` rounds in a row is warned of once, until it is faster again. Where no work was
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
        self._streaks = Counter({r: self._streaks[r] + 1 for r, t in enumerate(totals) if t > LIMIT * middle})
        warnings = []
        for rank in (rank for rank, rounds in self._streaks.items() if rounds == ROUNDS):
            extra = {phase: seconds - usual[phase] for phase, seconds in own[rank].items()}
            warnings.append(
                f"Rank {rank} on {hosts[rank]} is slow, and all others wait for it: in {ROUNDS} rounds in a row its "
                f"work took more than {LIMIT:g} times the median, now {totals[rank]:.3g} instead of {middle:.3g} s, "
                f"most of the difference in phase '{max(extra, key=extra.get)}'. Look at its GPU's clocks and "
                "temperature (`nvidia-smi -q -d PERFORMANCE`) and for other programs there, or leave that machine out."
            )
        return {"perf/slowest_rank": slowest, "perf/slowest_ratio": ratio}, warnings
