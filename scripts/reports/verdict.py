"""Did it improve, and by how much: the sentence at the top of a report."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hyvideo.evaluation.paired import ENOUGH_PAIRS, Gain, PairedComparison
from scripts.reports.charts import fixed, signed


@dataclass(frozen=True)
class Verdict:
    """The answer in words; `direction` is `better`, `worse` or `unclear`."""

    direction: str
    headline: str
    detail: str


def common_range(gains: Collection[Gain]) -> tuple[float, float]:
    """Shared axis range of stacked interval plots in base std: covers all intervals and 0, plus a margin."""
    low = min([0.0, *(gain.relative.low for gain in gains)])
    high = max([0.0, *(gain.relative.high for gain in gains)])
    margin = 0.06 * (high - low) or 1.0
    return low - margin, high + margin


def verdict_of(comparison: PairedComparison) -> Verdict:
    """Say what a comparison shows."""
    gain = comparison.gains["reward"]
    amount = f"reward {_amount(gain)}, 95 % interval {_range(gain)}"
    pairs = f"{gain.num_pairs} videos of the same prompts and seeds: {comparison.after} against {comparison.before}."
    if gain.num_pairs < ENOUGH_PAIRS:
        few = f"Only {pairs} At least {ENOUGH_PAIRS} are needed for a verdict ({amount})."
        return Verdict("unclear", "Too few videos to tell", few)
    said = {"better": "Improved", "worse": "Got worse", "unclear": "No clear change"}[gain.direction]
    return Verdict(gain.direction, f"{said}: {amount}", " ".join([pairs, *_components(comparison.gains)]))


def verdict_of_runs(
    lengths: Mapping[str, int], gained: Sequence[PairedComparison | None], common: int | None
) -> Verdict:
    """Say which of several runs gained most; none wins whose interval overlaps with another's.

    `lengths` are their updates by name, and `common` is the one after which their starts are compared with them.
    """
    ends = ", ".join(f"{name} has {length} updates" for name, length in lengths.items())
    if common is None:
        return Verdict("unclear", "Not compared: there is no update after which all runs validated", f"{ends}.")
    gains = {name: found.gains["reward"] for name, found in zip(lengths, gained, strict=True) if found}
    clear = {name: gain for name, gain in gains.items() if gain.direction == "better"}
    differ = f", the last that all validated: {ends}" if {*lengths.values()} != {common} else ""
    counted = f"{len(clear)} of {len(lengths)} runs clearly improved. Compared after update {common}{differ}."
    if not clear:
        return Verdict("unclear", "No run clearly improved", counted)
    first, best = max(clear.items(), key=lambda pair: pair[1].relative.mean)
    others = {name: gain for name, gain in gains.items() if name != first}
    doubts = [f"The interval of {n} overlaps." for n, gain in others.items() if gain.relative.high >= best.relative.low]
    doubts += [f"{name} cannot be compared." for name in lengths if name not in gains]
    detail = " ".join([f"{first} gained {_amount(best)}, 95 % interval {_range(best)}.", *doubts, counted])
    said = ("unclear", "No run clearly gained most") if doubts else ("better", f"{first} gained most")
    return Verdict(*said, detail)


def verdict_without_pairs(first: float, last: float, when: str) -> Verdict:
    """Say when there will be a verdict, and what is known: the training reward of a run's first and last tenth."""
    headline = f"No verdict yet: {when}"
    if not (math.isfinite(first) and math.isfinite(last)):
        return Verdict("unclear", headline, "The first finished round will show here.")
    detail = (
        "A verdict compares two validations of the same prompts and seeds. The training reward was "
        f"{fixed(first)} over the first and {fixed(last)} over the last tenth of the rounds, whose prompts differ."
    )
    return Verdict("unclear", headline, detail)


def _amount(gain: Gain) -> str:
    return f"{signed(gain.relative.mean)} {gain.unit}".rstrip()


def _range(gain: Gain) -> str:
    return f"{signed(gain.relative.low)} to {signed(gain.relative.high)}"


def _components(gains: Mapping[str, Gain]) -> list[str]:
    """Name the metrics that clearly rose and those that clearly fell."""
    sentences = []
    for direction, verb in {"better": "rose", "worse": "fell"}.items():
        names = [name for name, gain in gains.items() if name != "reward" and gain.direction == direction]
        if names:
            listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
            sentences.append(f"{listed} {verb}.")
    return sentences
