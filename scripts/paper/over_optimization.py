"""Runs that go on until they over-optimise a proxy of the reward: what the KL to an anchor saves (paper Eq. 11-15).

Example: `python -m scripts.paper.over_optimization`

The truth is the sum of VQ, MQ and TA, which is measured from pixels, and training sees a proxy that also pays for
brightness. A run first learns what proxy and truth share and then what only the proxy pays.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from hyvideo.evaluation.intervals import Interval, seed_interval
from hyvideo.models.reward_models.moving_shapes import MovingShapesReward
from hyvideo.models.reward_models.registry import RewardContext, RewardModel
from hyvideo.observability.scored_videos import read_scored_videos, scored_steps
from scripts.paper.drawing import BLACK, BLUE, ORANGE, PINK, legend_below, new_figure, tidy
from scripts.paper.kl_strategies import ANCHOR_STEPS, STRATEGIES
from scripts.paper.runs import Run
from scripts.paper.study import FAILS, HOLDS, OPEN, Claim, Study, paragraph
from scripts.paper.sweep import Arm, claim_ahead, difference, parse_budget, train_and_publish, verdict

ROUNDS, LOOKS, HELD_OUT = 18, 6, 64
LEAK, RATE = 2.0, 1e-4
TRUTH = ("VQ", "MQ", "TA")
BRIGHTNESS = (70.0, 20.0)
"""Mean pixel that the leak pays nothing for, and the grey levels it counts in."""

COLOURS = {"none": BLACK, "fixed": ORANGE, "moving": PINK, "dual": BLUE}
ANCHORED = ("fixed", "moving", "dual")
WEIGHTS = (0.03, 0.3)


class Proxy(RewardModel):
    """The truth with noise, and with a leak: what it pays for every 20 grey levels of brightness.

    Noise is drawn anew for every video but is the same whenever this video is scored.
    """

    metrics = ("proxy",)

    def __init__(self, context: RewardContext = RewardContext(), leak: float = 0.0, noise: float = 1.0) -> None:  # noqa: B008
        super().__init__(context)
        self._leak, self._noise, self._truth = leak, noise, MovingShapesReward(context)

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score uint8 videos `[B, F, H, W, 3]`."""
        truth = sum(self._truth(videos, prompts).values())
        sums = videos.long().sum((1, 2, 3, 4)).tolist()
        noise = torch.stack([torch.randn((), generator=torch.Generator().manual_seed(number)) for number in sums])
        brightness = (videos.float().mean((1, 2, 3, 4)) - BRIGHTNESS[0]) / BRIGHTNESS[1]
        return {"proxy": truth + self._noise * noise + self._leak * brightness}


def arms() -> list[Arm]:
    """No KL term, and each kind of anchor at each weight, all with the sampler settings of the demo."""
    return [_arm("none", 0.0), *(_arm(strategy, weight) for weight in WEIGHTS for strategy in ANCHORED)]


def label_of(strategy: str, weight: float) -> str:
    """The arm's name."""
    return strategy if strategy == "none" else f"{strategy}, weight {weight:g}"


def _arm(strategy: str, weight: float) -> Arm:
    settings = {
        "reward_config": {
            "models": {
                "scripts.paper.over_optimization:Proxy": {"sub_reward": {"proxy": 1.0}, "options": {"leak": LEAK}},
                "moving_shapes": {"weight": 0.0, "sub_reward": dict.fromkeys(TRUTH, 1.0)},
            }
        },
        "learning_rate": RATE,
        "use_same_noise": True,
        "sde_window": "first",
        "sde_window_size": 3,
        "kl_schedule": "fixed",
        "update_ref_model_step": ANCHOR_STEPS,
        "kl_weight": weight,
        "validate_at_step0": True,
        "validation_num_inference_steps": 6,
        **STRATEGIES[strategy],
    }
    return Arm(label_of(strategy, weight), settings)


def looks_of(run: Run) -> dict[str, list]:
    """Steps of a finished run's looks at its held-out videos, with the means of the proxy and of the truth."""
    steps = scored_steps(run.folder / "samples")
    looks = {step: [video.scores for video in read_scored_videos(folder)] for step, folder in steps.items()}
    truth = [np.mean([sum(score[metric] for metric in TRUTH) for score in scores]) for scores in looks.values()]
    proxy = [np.mean([score["reward"] for score in scores]) for scores in looks.values()]
    return {"looks": list(looks), "proxy": list(map(float, proxy)), "truth": list(map(float, truth))}


def _curves(found: Mapping[str, Any], arm: str, what: str) -> np.ndarray:
    """Gain over the first look, `[seeds, looks]`."""
    runs = found["arms"].get(arm, {"runs": {}})["runs"].values()
    return np.array([np.array(run[what]) - run[what][0] for run in runs])


def _second_half(found: Mapping[str, Any], arm: str, what: str) -> Interval:
    """What the second half of the run adds."""
    curves = _curves(found, arm, what)
    return seed_interval((curves[:, -1] - curves[:, curves.shape[1] // 2]).tolist())


def draw(found: Mapping[str, Any]) -> Figure:
    """One row per weight: proxy and truth over the updates, and the truth over the proxy."""
    figure = new_figure(7.5, 4.4)
    panels = figure.subplots(len(WEIGHTS), 3, sharex="col", sharey="col")
    for row, weight in zip(panels, WEIGHTS, strict=True):
        for strategy in COLOURS:
            if label_of(strategy, weight) in found["arms"]:
                _draw_arm(row, found, strategy, weight)
        tidy(row[0], title=f"proxy, kl_weight {weight:g}", xlabel="optimizer update", ylabel="gain on held-out videos")
        tidy(row[1], title="truth", xlabel="optimizer update")
        tidy(row[2], title="truth over proxy", xlabel="gain in proxy")
    legend_below(figure, panels[0, 0], columns=len(COLOURS))
    return figure


def _draw_arm(row: Sequence[Axes], found: Mapping[str, Any], strategy: str, weight: float) -> None:
    """Draw means over seeds, with the interval where there are several."""
    label, colour = label_of(strategy, weight), COLOURS[strategy]
    updates = next(iter(found["arms"][label]["runs"].values()))["looks"]
    curves = {what: _curves(found, label, what) for what in ("proxy", "truth")}
    for axes, of_seeds in zip(row, curves.values(), strict=False):
        axes.plot(updates, of_seeds.mean(0), color=colour, linewidth=1.6, label=strategy)
        bands = [seed_interval(values) for values in of_seeds.T.tolist()]
        axes.fill_between(updates, [b.low for b in bands], [b.high for b in bands], color=colour, alpha=0.12)
    row[2].plot(curves["proxy"].mean(0), curves["truth"].mean(0), "o-", color=colour, linewidth=1.6, markersize=3)


def describe(found: Mapping[str, Any]) -> str:
    """Say what was planted, and when the truth is best without a KL term."""
    seeds = min(len(arm["runs"]) for arm in found["arms"].values())
    best_look = ""
    if len(truth := _curves(found, "none", "truth")):
        means = truth.mean(0)
        update = next(iter(found["arms"]["none"]["runs"].values()))["looks"][int(means.argmax())]
        best_look = f"""Without a KL term the truth gains {means.max():+.3f} at update {update} and {means[-1]:+.3f} at
        the end."""
    return paragraph(
        f"""Training sees the truth (VQ + MQ + TA) with noise of one standard deviation of a metric, and is also paid
        {LEAK:g} for every {BRIGHTNESS[1]:g} grey levels of brightness. The rate is {RATE:g}, and lambda and anchors are
        those of the study above. Every run has {found["budget"]["rounds"]} rounds of 32 videos, with {seeds} seeds per
        arm and {found["budget"]["held_out"]} held-out videos at each of {LOOKS} looks. {best_look}"""
    )


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """Without a KL the truth falls while the proxy rises; the larger weight holds both back."""
    result = []
    if len(_curves(found, "none", "truth")) > 1:
        proxy, truth = (_second_half(found, "none", what) for what in ("proxy", "truth"))
        told = HOLDS if proxy.low > 0 > truth.high else FAILS if proxy.high < 0 or truth.low > 0 else OPEN
        text = "without a KL term the truth falls in the second half of a run while the proxy rises"
        result.append(Claim(text, told, f"proxy {proxy}, truth {truth}"))
    weight = WEIGHTS[-1]
    label, where = {strategy: label_of(strategy, weight) for strategy in COLOURS}, f"at kl_weight {weight:g},"
    held = {name: difference(found, "none", label[name]) for name in ANCHORED}
    result.append(claim_ahead(f"{where} every anchor holds back the proxy", "none", held))
    kept = {name: difference(found, label[name], "none", "Overall") for name in ANCHORED}
    told = "; ".join(f"{name} minus none {interval or 'no pair yet'}" for name, interval in kept.items())
    text = f"{where} every anchor ends with more truth than no KL term"
    result.append(Claim(text, verdict(list(kept.values())), told))
    ahead = {name: difference(found, label["dual"], label[name], "Overall") for name in ("fixed", "moving")}
    return [*result, claim_ahead(f"{where} dual ends with more truth than the other anchors", "dual", ahead)]


STUDY = Study("over_optimization", "A proxy that is over-optimised", describe, claims, draw)

if __name__ == "__main__":
    budget = parse_budget(sys.argv[1:], __doc__, ROUNDS, LOOKS, num_held_out=HELD_OUT)
    sys.exit(train_and_publish(STUDY, arms(), budget, more=looks_of))
