"""What a run gained, measured on videos of the same prompts and seeds, pair by pair, and the verdict in words."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import to_json

from hyvideo.data.files import replace_synced
from hyvideo.evaluation.intervals import Interval
from hyvideo.evaluation.paired import ENOUGH_PAIRS, Gain, PairedComparison, paired_gain, pairs_of
from hyvideo.observability.scored_videos import SCORES, ScoredVideo, read_scored_videos
from scripts.reports.run_record import RunRecord
from scripts.reports.words import fixed, signed

HELD_OUT = "gains.json"
HELD_OUT_VIDEOS = ("held_out/before", "held_out/after")
"""Folders of the videos of these gains, some of them left out: their scores, and prompts."""


@dataclass(frozen=True)
class HeldOutGains:
    """Paired gains over the base that a program measured itself, on more videos than validation has.

    Attributes:
        updates: of the run when it was measured; after more or fewer of them they say nothing.
        gains: `reward` and the metrics by name.
    """

    updates: int
    gains: dict[str, Gain]

    def __post_init__(self) -> None:
        if "reward" not in self.gains:
            raise ValueError(f"expected a gain of the reward; received those of {', '.join(self.gains) or 'nothing'}")

    @property
    def comparison(self) -> PairedComparison:
        """The trained model compared with its base, the reward's gain first."""
        gains = {"reward": self.gains["reward"], **self.gains}
        return PairedComparison("the base model, on held-out prompts", "the trained model", gains)


def write_held_out(folder: Path, measured: HeldOutGains) -> None:
    """Write gains to a run folder, where its report finds them."""
    replace_synced(folder / HELD_OUT, to_json(measured, indent=1, inf_nan_mode="constants") + b"\n")


def read_held_out(folder: Path) -> HeldOutGains:
    """Read what `write_held_out` wrote."""
    path = folder / HELD_OUT
    try:
        return TypeAdapter(HeldOutGains).validate_json(path.read_bytes(), strict=True)
    except ValueError as error:
        raise ValueError(f"{path}: expected paired gains by name, as `make demo` writes them ({error}).") from error


def improvement(run: RunRecord, *, held_out: bool = True) -> PairedComparison | None:
    """Compare a run with its beginning, and name the videos that were compared.

    Held-out gains of its last update are preferred, unless `held_out` is False; else its last validation is compared
    with the earliest of the same prompts, seeds and settings. None when there is none with at least two pairs.
    """
    there = held_out and (run.folder / HELD_OUT).is_file()
    if there and (measured := read_held_out(run.folder)).updates == run.num_updates:
        folders = [run.folder / name for name in HELD_OUT_VIDEOS]
        there = all((folder / SCORES).is_file() for folder in folders)
        return replace(measured.comparison, pairs=pairs_of(*map(read_scored_videos, folders)) if there else ())
    *earlier, last = run.samples or [None]
    for first in earlier:
        before = f"validation after update {first}" if first else "validation before training"
        if found := _compare(run.samples[first], run.samples[last], before, f"validation after update {last}"):
            return found
    return None


def gains_over_training(run: RunRecord) -> dict[int, Gain]:
    """Compare the reward of every validation with the earliest one that the last can be compared with, by update.

    The earliest compares with itself: 0. Empty without two validations of the same prompts, seeds and settings.
    """
    for first in run.samples:
        found = {step: _compare(run.samples[first], after, "", "") for step, after in run.samples.items()}
        gains = {step: comparison.gains["reward"] for step, comparison in found.items() if comparison and step >= first}
        if len(gains) > 1 and max(gains) == max(run.samples):
            return gains
    return {}


def worst_median_best(before: Sequence[float], after: Sequence[float]) -> dict[str, int]:
    """Return the numbers of the pairs of rewards [N] that gained least, the median, and most; failed ones left out.

    Two pairs have no median, and fewer none of the three.
    """
    gains = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    order = [int(number) for number in np.argsort(gains, kind="stable") if np.isfinite(gains[number])]
    if len(order) < 2:
        return {}
    middle = {"median": order[len(order) // 2]} if len(order) > 2 else {}
    return {"worst": order[0], **middle, "best": order[-1]}


def against(reference: RunRecord, run: RunRecord) -> PairedComparison | None:
    """Compare the last validations of two runs; None where they differ in prompts, seeds, sampling or reward.

    Intervals are over videos: two training seeds of one method may well differ by more.
    """
    if not (reference.samples and run.samples):
        return None
    first, second = (list(record.samples.values())[-1] for record in (reference, run))
    return _compare(first, second, reference.name, run.name)


def _compare(
    before: Sequence[ScoredVideo], after: Sequence[ScoredVideo], before_name: str, after_name: str
) -> PairedComparison | None:
    """Measure the gain of every score that both sides have; None without one of the reward."""
    pairs = pairs_of(before, after)
    names = dict.fromkeys(name for first, second in pairs for name in first.scores if name in second.scores)
    gains = {}
    for name in sorted(names, key=lambda name: name != "reward"):
        scores = np.array([[video.scores.get(name, math.nan) for video in pair] for pair in pairs], dtype=float)
        if np.isfinite(scores).all(1).sum() >= 2:  # whole pairs
            gains[name] = paired_gain(*scores.T)
    return PairedComparison(before_name, after_name, gains, pairs) if "reward" in gains else None


@dataclass(frozen=True)
class Verdict:
    """The answer in words; `direction` is `better`, `worse` or `unclear`."""

    direction: str
    headline: str
    detail: str


def common_range(intervals: Collection[Interval]) -> tuple[float, float]:
    """Shared axis range of stacked interval plots: covers all intervals and 0, plus a margin."""
    low = min([0.0, *(interval.low for interval in intervals)])
    high = max([0.0, *(interval.high for interval in intervals)])
    margin = 0.06 * (high - low) or 1.0
    return low - margin, high + margin


def verdict_of(comparison: PairedComparison) -> Verdict:
    """Say what a comparison shows."""
    gain = comparison.gains["reward"]
    amount = f"reward {_amount(gain)}"
    pairs = f"{gain.num_pairs} videos of the same prompts and seeds: {comparison.after} against {comparison.before}."
    if gain.num_pairs < ENOUGH_PAIRS:
        few = f"Only {pairs} At least {ENOUGH_PAIRS} are needed for a verdict ({amount})."
        return Verdict("unclear", "Too few videos to tell", few)
    said = {"better": "Improved", "worse": "Got worse", "unclear": "No clear change"}[gain.direction]
    for direction, verb in {"better": "rose", "worse": "fell"}.items():
        changed = [name for name, g in comparison.gains.items() if name != "reward" and g.direction == direction]
        if changed:
            pairs += f" {' and '.join(filter(None, [', '.join(changed[:-1]), changed[-1]]))} {verb}."
    return Verdict(gain.direction, f"{said}: {amount}", pairs)


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
    detail = " ".join([f"{first} gained {_amount(best)}.", *doubts, counted])
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
    shown = gain.relative
    amount = f"{signed(shown.mean)} {gain.unit}".rstrip()
    return f"{amount}, 95 % interval {signed(shown.low)} to {signed(shown.high)}"
