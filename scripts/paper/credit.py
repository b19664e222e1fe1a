"""SAGE with credit maps that say where the pixels are wrong, with the same maps shuffled, and with uniform ones.

Example: `python -m scripts.paper.credit`
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor

from hyvideo.models.reward_models.credit import Grid
from hyvideo.models.reward_models.moving_shapes import MovingShapesReward
from hyvideo.models.reward_models.registry import RewardContext
from scripts.paper.drawing import BLUE, GREEN, ORANGE, name_rows, new_figure, tidy
from scripts.paper.study import Claim, Study, paragraph
from scripts.paper.sweep import Arm, claim_ahead, difference, draw_arm, gain, setup_text, tiny_config
from scripts.paper.tuning import publish_tuned, tuned_settings

ROUNDS = 12
COLOURS = {"true": GREEN, "shuffled": ORANGE, "uniform": BLUE}
"""Kind of map -> its colour."""


class Mapped(MovingShapesReward):
    """The reward of moving shapes with a true, shuffled or uniform credit map."""

    def __init__(self, context: RewardContext, kind: Literal["true", "shuffled", "uniform"]) -> None:
        super().__init__(context)
        self._kind = kind

    def scores_and_credit(self, videos: Tensor, prompts: Sequence[str], grid: Grid) -> tuple[dict[str, Tensor], Tensor]:
        """Score videos; shuffled are the latents of a video, by an order that its pixels decide."""
        scores, credit = super().scores_and_credit(videos, prompts, grid)
        if self._kind == "uniform":
            credit = torch.ones_like(credit)
        if self._kind == "shuffled":
            drawn = [torch.Generator().manual_seed(int(video.long().sum())) for video in videos]
            orders = [torch.randperm(credit[0].numel(), generator=generator) for generator in drawn]
            credit = torch.stack([each.flatten()[order] for each, order in zip(credit, orders, strict=True)])
        return scores, credit.reshape(-1, *grid)


def arms(docs: Path) -> list[Arm]:
    """One for each kind of map, at SAGE's tuned rate and noise."""
    name, weights = f"{__package__}.credit:Mapped", dict(tiny_config().reward.reward_weights)
    return [
        Arm(
            kind,
            {
                "reward_config": {"models": {name: {"sub_reward": weights, "options": {"kind": kind}}}},
                "reward_credit": name,
                **tuned_settings("sage_grpo", docs),
            },
        )
        for kind in COLOURS
    ]


def draw(found: Mapping[str, Any]) -> Figure:
    """One row per kind of map."""
    figure = new_figure(6, 1.9)
    axes = figure.subplots()
    for place, (kind, colour) in enumerate(COLOURS.items()):
        draw_arm(axes, place, found, kind, colour)
    name_rows(axes, [f"{kind} maps" for kind in COLOURS])
    tidy(axes, xlabel="gain in held-out reward")
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say what was compared, with every gain."""
    gains = ", ".join(f"{kind} {gain(found, kind)}" for kind in COLOURS if kind in found["arms"])
    return paragraph(
        f"""The true map of a video is how far its pixels are from the nearest video that is right, as a mean over each
        latent. Shuffled maps have the same values at random latents, and uniform ones are as none
        ([credit maps](rewards.md#credit-maps)). {setup_text(found)} Gains: {gains}."""
    )


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """A map helps, and because of where it is high."""
    ahead = {kind: difference(found, "true", kind) for kind in ("uniform", "shuffled")}
    return [
        claim_ahead("true credit maps teach more than uniform ones", "true", {"uniform": ahead["uniform"]}),
        claim_ahead("true credit maps teach more than shuffled ones", "true", {"shuffled": ahead["shuffled"]}),
    ]


STUDY = Study("credit", "Credit where the pixels are wrong", draw, describe, claims)

if __name__ == "__main__":
    sys.exit(publish_tuned(STUDY, arms, sys.argv[1:], __doc__, ROUNDS))
