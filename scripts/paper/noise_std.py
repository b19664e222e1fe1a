"""Noise per step of SAGE, Flow-GRPO and DanceGRPO in three regimes (paper appendix).

Example: `python -m scripts.paper.noise_std`

The regimes: all on one schedule, as this project runs them; the same with Flow-GRPO's singular first step cut where
SAGE's is, instead of taking the level of the next step; and each with the steps, shift and eta its authors publish.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from scripts.paper.drawing import COLOURS, MARKERS, SAMPLERS, legend_below, new_figure, tidy
from scripts.paper.study import FAILS, HOLDS, Claim, Study, paragraph

COMPARED = ("sage_grpo", "flow_grpo", "dance_grpo")
STEPS, SHIFT, ETA, CLAMP = 20, 5.0, 0.5, 3e-3
PUBLISHED = {"sage_grpo": (20, 5.0, 0.5), "flow_grpo": (10, 3.0, 0.7), "dance_grpo": (16, 5.0, 0.25)}
"""Steps, shift, eta: the paper's; Flow-GRPO's for Stable Diffusion 3.5; DanceGRPO's for HunyuanVideo."""


def find() -> dict[str, Any]:
    """Levels at which the steps start and their noise std, for each regime and sampler."""
    shared = {sampler: _steps(sampler, STEPS, SHIFT, ETA) for sampler in COMPARED}
    sigma, (_, *std) = shared["flow_grpo"].values()  # its first-order rule takes the level 1 - clamp at sigma 1
    first = ETA * math.sqrt((1 - CLAMP - sigma[1]) * (1 - CLAMP) / CLAMP)
    clamped = {**shared, "flow_grpo": {"sigma": sigma, "std": [first, *std]}}
    published = {sampler: _steps(sampler, *PUBLISHED[sampler]) for sampler in COMPARED}
    return {
        "settings": {"steps": STEPS, "shift": SHIFT, "eta": ETA, "sage_clamp": CLAMP, "published": PUBLISHED},
        "regimes": {"one schedule": shared, "both clamped": clamped, "published settings": published},
    }


def _steps(sampler: str, steps: int, shift: float, eta: float) -> dict[str, list[float]]:
    """Levels and std of one sampler."""
    scheduler = FlowMatchDiscreteScheduler(shift=shift, sage_clamp=CLAMP)
    scheduler.set_timesteps(steps)
    std = scheduler.step_weights(sde_type=sampler, eta=eta).std
    return {"sigma": scheduler.sigmas.tolist(), "std": std.tolist()}


def draw(found: Mapping[str, Any]) -> Figure:
    """One panel per regime: std of every step, in the order of denoising."""
    figure = new_figure(10, 3.4)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, (regime, samplers) in zip(panels, found["regimes"].items(), strict=True):
        for sampler in COMPARED:
            std = samplers[sampler]["std"]
            axes.plot(
                [step / len(std) for step in range(len(std))],
                std,
                color=COLOURS[sampler],
                marker=MARKERS[sampler],
                markersize=3.5,
                linewidth=1.3,
                label=SAMPLERS[sampler],
            )
        axes.set_yscale("log")
        ticks = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5)
        axes.set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        tidy(axes, title=regime, xlabel="steps done before this one (share of all)")
    panels[0].set_ylabel("noise added by the step (std, latent units)", fontsize=9)
    legend_below(figure, panels[0], columns=3)
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say what the regimes are and what is seen in them."""
    settings, regimes = found["settings"], found["regimes"]
    ratio = _excess(regimes["one schedule"])
    first = {name: [regimes[name][sampler]["std"][0] for sampler in COMPARED] for name in regimes}
    one, both = first["one schedule"], first["both clamped"]
    return paragraph(
        f"""The panels show the standard deviation of each step's noise. In *one schedule*, every sampler takes
        {settings["steps"]} steps at shift {settings["shift"]:g} and eta {settings["eta"]:g}. After the first step
        Flow-GRPO adds {min(ratio):.2f} to {max(ratio):.2f} times the noise of SAGE. At σ = 1 SAGE and Flow-GRPO are
        singular, so their first step depends on where they are cut. SAGE stops at 1 − {settings["sage_clamp"]:g} and
        adds {one[0]:.2f}, while Flow-GRPO takes the level of the next step and adds {one[1]:.2f}. Cut where SAGE is
        (*both clamped*), it adds {both[1]:.2f}.
        *Published settings* are {_published(settings, "sage_grpo")} for SAGE;
        {_published(settings, "flow_grpo")} for Flow-GRPO (Stable Diffusion 3.5);
        {_published(settings, "dance_grpo")} for DanceGRPO (HunyuanVideo)."""
    )


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """SAGE is the quieter one."""
    shared, clamped = found["regimes"]["one schedule"], found["regimes"]["both clamped"]
    ratio = _excess(shared)
    below = all(value > 1 for value in ratio)
    first = clamped["flow_grpo"]["std"][0] / clamped["sage_grpo"]["std"][0]
    alone = shared["flow_grpo"]["std"][0] / shared["sage_grpo"]["std"][0]
    return [
        Claim(
            "SAGE adds less noise than the first-order rule of Flow-GRPO at every step after the first",
            HOLDS if below else FAILS,
            f"Flow-GRPO adds {min(ratio):.2f} to {max(ratio):.2f} times as much",
        ),
        Claim(
            "SAGE adds less noise than Flow-GRPO at the singular first step",
            HOLDS if min(first, alone) > 1 else FAILS,
            f"Flow-GRPO adds {first:.2f} times as much when both are clamped, but {alone:.2f} by its own rule",
        ),
    ]


def _excess(samplers: Mapping[str, Mapping[str, list[float]]]) -> list[float]:
    """Flow-GRPO's std over SAGE's at every step but the first."""
    pairs = zip(samplers["flow_grpo"]["std"][1:], samplers["sage_grpo"]["std"][1:], strict=True)
    return [flow / sage for flow, sage in pairs]


def _published(settings: Mapping[str, Any], sampler: str) -> str:
    steps, shift, eta = settings["published"][sampler]
    return f"{steps} steps, shift {shift:g}, eta {eta:g}"


STUDY = Study("noise_std", "Noise of a step in three regimes", draw, describe, claims)

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    STUDY.publish(find())
