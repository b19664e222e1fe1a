"""What a run gained, measured on its own validation videos: same prompts and seeds, pair by pair."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from hyvideo.evaluation.paired import PairedGain, paired_gain
from hyvideo.observability.run_record import RunRecord
from hyvideo.observability.scored_videos import ScoredVideo
from hyvideo.observability.verdict import Comparison, Gain

HELD_OUT = "gains.json"
"""Paired gains that a program measured itself, on more videos than validation has (`make demo` writes them)."""


def improvement(run: RunRecord) -> Comparison | None:
    """Compare a run with its beginning.

    Held-out gains in the run folder are preferred; else the first and the last validation are compared. None when there
    are not two of them with at least two pairs.

    Raises:
        ValueError: the held-out gains cannot be read.
    """
    if (run.folder / HELD_OUT).is_file():
        gains = _read_gains(run.folder / HELD_OUT)
        return Comparison("the base model", "the trained model, on held-out prompts", gains)
    steps = list(run.samples)
    if len(steps) < 2:
        return None
    first, last = steps[0], steps[-1]
    before = f"after update {first}" if first else "before training"
    return _compare(run.samples[first], run.samples[last], before, f"after update {last}")


def against(reference: RunRecord, run: RunRecord) -> Comparison | None:
    """Compare the last validation of a run with that of a reference run; None where prompts and videos do not pair."""
    if not (reference.samples and run.samples):
        return None
    first, second = (list(record.samples.values())[-1] for record in (reference, run))
    return _compare(first, second, reference.name, run.name)


def _compare(
    before: Sequence[ScoredVideo], after: Sequence[ScoredVideo], before_name: str, after_name: str
) -> Comparison | None:
    """Pair videos by number and prompt: a validation's seeds depend on nothing else."""
    earlier = {(video.path.name, video.prompt): video.scores for video in before}
    pairs = [(earlier[key], video.scores) for video in after if (key := (video.path.name, video.prompt)) in earlier]
    names = dict.fromkeys(name for scores in pairs for name in scores[0] if name in scores[1])
    gains = [gain for name in sorted(names, key=lambda name: name != "reward") if (gain := _gain(name, pairs))]
    return Comparison(before_name, after_name, gains) if gains and gains[0].name == "reward" else None


def _gain(name: str, pairs: Sequence[tuple]) -> Gain | None:
    """Measure one score's gain; None with fewer than two whole pairs."""
    before, after = (np.array([pair[side].get(name, math.nan) for pair in pairs], dtype=float) for side in (0, 1))
    if (np.isfinite(before) & np.isfinite(after)).sum() < 2:
        return None
    return _named(name, paired_gain(before, after))


def _named(name: str, gain: PairedGain) -> Gain:
    """Name a paired gain."""
    return Gain(name, gain.before, gain.after, gain.mean, gain.low, gain.high, gain.num_pairs, gain.num_left_out)


def _read_gains(path: Path) -> list[Gain]:
    """Read what `make demo` measured."""
    try:
        listed = TypeAdapter(dict[str, PairedGain]).validate_json(path.read_bytes(), strict=True)
    except ValueError as error:
        raise ValueError(f"{path}: expected paired gains by name, as `make demo` writes them ({error}).") from error
    gains = [_named(name, gain) for name, gain in listed.items()]
    return sorted(gains, key=lambda gain: gain.name != "reward")
