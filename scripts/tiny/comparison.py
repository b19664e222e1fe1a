"""Compare a trained tiny model with its base on held-out prompts; demo and learning proof share it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hyvideo.config.schema import Config
from hyvideo.data.prompts import Prompt, read_prompts, repeated
from hyvideo.evaluation.drift import Drift, drift, looks_of
from hyvideo.evaluation.paired import Gain, paired_gain
from hyvideo.models.reward_models.moving_shapes import correct
from hyvideo.models.reward_models.rewards import Scores

TUNED_ON = 128
"""Held-out prompts that the demo's settings were chosen by: the first ones."""

FAR = 40
"""Grey levels of 255; the backgrounds of the bundled model's training videos are 88 apart."""


@dataclass(frozen=True)
class Kept:
    """What training kept of tiny videos, though their reward hardly sees it.

    Attributes:
        hits: share of the videos that strictly show the prompt's colour and shape, before and after.
        moved: share of the dark and light backgrounds that changed by more than FAR grey levels.
        drift: of what any video has.
    """

    hits: tuple[float, float]
    moved: float
    drift: Drift

    def __str__(self) -> str:
        before, after = self.hits
        return (
            f"videos with the right shape in its full colour: {before:.0%} before, {after:.0%} after\n"
            f"dark and light backgrounds moved by more than {FAR} of 255 levels: {self.moved:.0%}\n"
            f"what else changed: {self.drift}"
        )


def held_out_prompts(config: Config, count: int, prompts: slice) -> list[Prompt]:
    """Return `count` held-out prompts, over and over those of a slice of them all, each with a noise of its own.

    Raises:
        ValueError: the slice is empty.
    """
    known = read_prompts(config.data.valid_video_csv)
    if not known[prompts]:
        raise ValueError(
            f"valid_video_csv has {len(known)} prompts; expected more than {prompts.start}, which are left out."
        )
    return repeated(known[prompts], count)


def gains(before: Scores, after: Scores) -> dict[str, Gain]:
    """Return the paired gain of the total reward and of each metric, with 95 % intervals."""
    metrics = {name: paired_gain(before.metrics[name], after.metrics[name]) for name in before.metrics}
    return {"reward": paired_gain(before.total, after.total), **metrics}


def tiny_looks(videos: Tensor, prompts: Sequence[Prompt]) -> list[dict[str, float]]:
    """Measure uint8 videos `[B, F, H, W, 3]` as `looks_of`, and whether each shows its prompt: `hits`, 0 or 1."""
    hits = correct(videos, [prompt.text for prompt in prompts]).tolist()
    return [looks | {"hits": float(hit)} for looks, hit in zip(looks_of(videos), hits, strict=True)]


def kept(
    before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]], prompts: Sequence[Prompt]
) -> Kept:
    """Compare what `tiny_looks` measured of N videos before and after training; a ValueError for too few prompts."""
    borders = [[looks["border"] * 255 for looks in side] for side in (before, after)]
    far = [abs(new - old) > FAR for old, new in zip(*borders, strict=True) if abs(old - 128) > FAR]
    hits = tuple(sum(looks["hits"] for looks in side) / len(side) for side in (before, after))
    moved = sum(far) / len(far) if far else 0.0
    return Kept(hits, moved, drift(before, after, [prompt.text for prompt in prompts]))
