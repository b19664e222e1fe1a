"""What a run gained, measured on its own validation videos: same prompts and seeds, pair by pair."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import to_json

from hyvideo.data.files import replacing
from hyvideo.evaluation.paired import Gain, PairedComparison, paired_gain
from hyvideo.observability.run_record import RunRecord
from hyvideo.observability.scored_videos import ScoredVideo

HELD_OUT = "gains.json"


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
    with replacing(folder / HELD_OUT) as path:
        path.write_bytes(to_json(measured, indent=1, inf_nan_mode="constants") + b"\n")


def read_held_out(folder: Path) -> HeldOutGains:
    """Read what `write_held_out` wrote.

    Raises:
        ValueError: it cannot be read.
    """
    path = folder / HELD_OUT
    try:
        return TypeAdapter(HeldOutGains).validate_json(path.read_bytes(), strict=True)
    except ValueError as error:
        raise ValueError(f"{path}: expected paired gains by name, as `make demo` writes them ({error}).") from error


def improvement(run: RunRecord) -> PairedComparison | None:
    """Compare a run with its beginning.

    Held-out gains of its last update are preferred; else its last validation is compared with the earliest of the same
    prompts, seeds and settings. None when there is none with at least two pairs.

    Raises:
        ValueError: the held-out gains cannot be read.
    """
    if (run.folder / HELD_OUT).is_file() and (held_out := read_held_out(run.folder)).updates == run.num_updates:
        return held_out.comparison
    *earlier, last = run.samples or [None]
    for first in earlier:
        before = f"after update {first}" if first else "before training"
        if found := _compare(run.samples[first], run.samples[last], before, f"after update {last}"):
            return found
    return None


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
    """Pair videos by number, prompt, and how they were sampled and scored: their noise depends on nothing else."""
    earlier = {(video.path.name, video.prompt, video.how): video.scores for video in before}
    keys = [(video.path.name, video.prompt, video.how) for video in after]
    pairs = [(earlier[key], video.scores) for key, video in zip(keys, after, strict=True) if key in earlier]
    names = dict.fromkeys(name for scores in pairs for name in scores[0] if name in scores[1])
    gains = {name: gain for name in sorted(names, key=lambda name: name != "reward") if (gain := _gain(name, pairs))}
    return PairedComparison(before_name, after_name, gains) if "reward" in gains else None


def _gain(name: str, pairs: Sequence[tuple]) -> Gain | None:
    """Measure one score's gain; None with fewer than two whole pairs."""
    before, after = (np.array([pair[side].get(name, math.nan) for pair in pairs], dtype=float) for side in (0, 1))
    if (np.isfinite(before) & np.isfinite(after)).sum() < 2:
        return None
    return paired_gain(before, after)
