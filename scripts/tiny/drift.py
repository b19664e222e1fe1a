"""What training changed in tiny videos that their reward hardly sees: colours, backgrounds and fine patterns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyvideo.evaluation.paired import Gain, paired_gain
from hyvideo.models.reward_models.moving_shapes import correct
from scripts.tiny.clips import BACKGROUNDS

DRIFT = "drift.json"
"""File of a run folder that holds its `Drift`."""

LEVELS = dict(zip(("dark", "grey", "light"), BACKGROUNDS, strict=True))


@dataclass(frozen=True)
class Change:
    """How one look of N videos changed from one model to another, prompt by prompt with the same noise.

    Attributes:
        gain: mean paired change, which is 0 where as many videos rise as fall.
        moved: mean absolute paired change, which is not.
        spread: standard deviation over the videos, before and after. It falls where videos become alike.
    """

    gain: Gain
    moved: float
    spread: tuple[float, float]

    def __str__(self) -> str:
        before, after = self.spread
        return f"{self.gain}; moved by {self.moved:.2f}, spread {before:.2f} to {after:.2f}"


@dataclass(frozen=True)
class Drift:
    """All looks of N videos, compared.

    Attributes:
        changes: by look, see `appearance`.
        backgrounds: share of the videos whose background is nearest to each of LEVELS, before and after.
    """

    changes: dict[str, Change]
    backgrounds: dict[str, tuple[float, float]]

    @property
    def collapsed(self) -> bool:
        """Whether backgrounds became alike: their spread fell by more than a fifth.

        By chance the spread of 128 videos falls so far in less than 1 of 100 comparisons, even of unrelated videos.
        """
        before, after = self.changes["background"].spread
        return after < 0.8 * before

    def __str__(self) -> str:
        (first, *others), spread = self.backgrounds.items(), self.changes["background"].spread
        shares = [f"{first[0]} backgrounds {first[1][0]:.0%} before, {first[1][1]:.0%} after"]
        shares += [f"{name} {before:.0%}, {after:.0%}" for name, (before, after) in others]
        return f"{'; '.join(shares)}; their spread {spread[0]:.0f} before, {spread[1]:.0f} after, of 255 levels"


def appearance(videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
    """Return per video `[B]` what a drift of training would move, for uint8 videos `[B, F, H, W, 3]`.

    `hits` is 1 where colour and shape are strictly the prompt's. `background` is the background's grey level, 0 to 255.
    `red`, `green` and `blue` are how far each channel's mean is above that of all three. `roughness` is the mean
    difference of a pixel from its four neighbours, which rises with blotches and regular dots alike.
    """
    pixels = videos.float()
    channels = pixels.mean((1, 2, 3))
    inner = pixels[:, :, 1:-1, 1:-1]
    around = (pixels[:, :, :-2, 1:-1] + pixels[:, :, 2:, 1:-1] + pixels[:, :, 1:-1, :-2] + pixels[:, :, 1:-1, 2:]) / 4
    return {
        "hits": correct(videos, prompts).float(),
        "background": pixels.flatten(1, 3).median(1).values.mean(-1),
        **dict(zip(("red", "green", "blue"), (channels - channels.mean(1, keepdim=True)).T, strict=True)),
        "roughness": (inner - around).abs().mean((1, 2, 3, 4)),
    }


def drift(before: dict[str, Tensor], after: dict[str, Tensor]) -> Drift:
    """Compare what `appearance` returned for the videos of two models, of the same prompts and noise.

    Raises:
        ValueError: they are not of equally many videos, at least 2.
    """
    changes = {
        name: Change(
            paired_gain(look, after[name]),
            float((after[name] - look).abs().mean()),
            (float(look.std()), float(after[name].std())),
        )
        for name, look in before.items()
    }
    shares = [_share_by_level(looks["background"]) for looks in (before, after)]
    return Drift(changes, dict(zip(LEVELS, zip(*shares, strict=True), strict=True)))


def _share_by_level(background: Tensor) -> list[float]:
    """Return the share of backgrounds `[B]` that is nearest to each of LEVELS."""
    nearest = (background[:, None] - torch.tensor(BACKGROUNDS)).abs().argmin(1)
    return (nearest.bincount(minlength=len(BACKGROUNDS)) / len(background)).tolist()
