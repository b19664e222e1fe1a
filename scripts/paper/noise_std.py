"""Noise per step of SAGE, Flow-GRPO and DanceGRPO in three regimes, and the excess of a first-order rule (Eq. 5-7).

Example: `python -m scripts.paper.noise_std`

The regimes: all on one schedule, as this project runs them; the same with Flow-GRPO's singular first step cut where
SAGE's is, instead of taking the level of the next step; and each with the steps, shift and eta its authors publish.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from scipy.integrate import quad

from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler, flow_variance, sage_variance
from scripts.paper.study import COLOURS, FAILS, HOLDS, MARKERS, SAMPLERS, Claim, Study, legend_below, paragraph, tidy

STEPS, SHIFT, ETA, CLAMP = 20, 5.0, 0.5, 3e-3
STEP_COUNTS = (10, 20, 50)
PUBLISHED = {"sage_grpo": (20, 5.0, 0.5), "flow_grpo": (10, 3.0, 0.7), "dance_grpo": (16, 5.0, 0.25)}
"""Steps, shift, eta: the paper's; Flow-GRPO's for Stable Diffusion 3.5; DanceGRPO's for HunyuanVideo."""


def find() -> dict[str, Any]:
    """Levels and noise std of every step for each regime and sampler; variances of whole schedules, three ways."""
    shared = {sampler: _steps(sampler, STEPS, SHIFT, ETA) for sampler in COLOURS}
    sigma, (_, *std) = shared["flow_grpo"].values()  # its first-order rule takes the level 1 - clamp at sigma 1
    first = ETA * math.sqrt((1 - CLAMP - sigma[1]) * (1 - CLAMP) / CLAMP)
    clamped = {**shared, "flow_grpo": {"sigma": sigma, "std": [first, *std]}}
    published = {sampler: _steps(sampler, *PUBLISHED[sampler]) for sampler in COLOURS}
    return {
        "settings": {"steps": STEPS, "shift": SHIFT, "eta": ETA, "sage_clamp": CLAMP, "published": PUBLISHED},
        "regimes": {"one schedule": shared, "both clamped": clamped, "published settings": published},
        "excess": {str(steps): _excess(steps) for steps in STEP_COUNTS},
        "largest_error_of_closed_form": max(_error_of_closed_form(steps) for steps in STEP_COUNTS),
    }


def _scheduler(steps: int, shift: float = SHIFT) -> FlowMatchDiscreteScheduler:
    scheduler = FlowMatchDiscreteScheduler(shift=shift, sage_clamp=CLAMP)
    scheduler.set_timesteps(steps)
    return scheduler


def _steps(sampler: str, steps: int, shift: float, eta: float) -> dict[str, list[float]]:
    """Levels and std of one sampler."""
    scheduler = _scheduler(steps, shift)
    return {"sigma": scheduler.sigmas.tolist(), "std": scheduler.step_weights(sde_type=sampler, eta=eta).std.tolist()}


def _excess(steps: int) -> list[float]:
    """Relative excess of the first-order rule over the integral, at every step but the singular first one."""
    sigmas = _scheduler(steps).sigmas.double()[1:]
    exact = sage_variance(sigmas[:-1], sigmas[1:], 1.0, CLAMP)
    return (flow_variance(sigmas[:-1], sigmas[1:], 1.0) / exact - 1).tolist()


def _error_of_closed_form(steps: int) -> float:
    """Largest relative difference of the closed form to numerical integration, over all steps."""
    sigmas = _scheduler(steps).sigmas.double()
    exact = sage_variance(sigmas[:-1], sigmas[1:], 1.0, CLAMP)
    ends = zip(sigmas[1:].tolist(), sigmas[:-1].clamp_max(1 - CLAMP).tolist(), strict=True)
    numeric = [quad(lambda s: s / (1 - s), *end, epsabs=0, epsrel=1e-12)[0] for end in ends]
    return float((exact / torch.tensor(numeric, dtype=torch.float64) - 1).abs().max())


def draw(found: Mapping[str, Any]) -> Figure:
    """One panel per regime: std of every step, in the order of denoising."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, (regime, samplers) in zip(panels, found["regimes"].items(), strict=True):
        for sampler, colour in COLOURS.items():
            std = samplers[sampler]["std"]
            place = [step / len(std) for step in range(len(std))]
            style = {"color": colour, "marker": MARKERS[sampler], "markersize": 3.5, "linewidth": 1.3}
            axes.plot(place, std, label=SAMPLERS[sampler], **style)
        axes.set_yscale("log")
        axes.set_yticks(ticks := (0.03, 0.05, 0.1, 0.2, 0.3, 0.5), labels=[f"{tick:g}" for tick in ticks])
        tidy(axes, title=regime, xlabel="steps done before this one (share of all)")
    panels[0].set_ylabel("noise added by the step (std, latent units)", fontsize=9)
    legend_below(figure, panels[0], columns=3)
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say what the regimes are and what is seen in them."""
    settings, regimes = found["settings"], found["regimes"]
    one, both = ([regimes[name][s]["std"][0] for s in COLOURS] for name in ("one schedule", "both clamped"))
    of = {name: "{} steps, shift {:g}, eta {:g}".format(*chosen) for name, chosen in settings["published"].items()}
    return paragraph(
        f"""*One schedule* has {settings["steps"]} steps, shift {settings["shift"]:g} and eta {settings["eta"]:g}. At
        σ = 1 SAGE and Flow-GRPO are singular: SAGE stops at 1 − {settings["sage_clamp"]:g} and adds {one[0]:.2f},
        Flow-GRPO takes the level of the next step and adds {one[1]:.2f}, and {both[1]:.2f} if it is cut where SAGE is
        (*both clamped*). *Published settings* are {of["sage_grpo"]} for SAGE; {of["flow_grpo"]} for Flow-GRPO;
        {of["dance_grpo"]} for DanceGRPO. SAGE's closed form agrees with numerical integration within
        {found["largest_error_of_closed_form"]:.0e}."""
    )


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """SAGE is the quieter one, because the first-order rule is too large."""
    shared, clamped = found["regimes"]["one schedule"], found["regimes"]["both clamped"]
    excess = [error for errors in found["excess"].values() for error in errors]
    pairs = zip(shared["flow_grpo"]["std"][1:], shared["sage_grpo"]["std"][1:], strict=True)
    ratio = [flow / sage for flow, sage in pairs]
    first = clamped["flow_grpo"]["std"][0] / clamped["sage_grpo"]["std"][0]
    alone = shared["flow_grpo"]["std"][0] / shared["sage_grpo"]["std"][0]
    return [
        Claim(
            "a first-order rule injects energy beyond the true integral, and the integral has a closed form",
            HOLDS if min(excess) > 0 and found["largest_error_of_closed_form"] < 1e-6 else FAILS,
            f"{min(excess):.0%} to {max(excess):.0%} more variance at 10 to 50 steps",
        ),
        Claim(
            "SAGE adds less noise than the first-order rule of Flow-GRPO at every step after the first",
            HOLDS if min(ratio) > 1 else FAILS,
            f"Flow-GRPO adds {min(ratio):.2f} to {max(ratio):.2f} times as much",
        ),
        Claim(
            "SAGE adds less noise than Flow-GRPO at the singular first step",
            HOLDS if min(first, alone) > 1 else FAILS,
            f"Flow-GRPO adds {first:.2f} times as much when both are clamped, but {alone:.2f} by its own rule",
        ),
    ]


STUDY = Study("noise_std", "Noise of a step in three regimes", describe, claims, draw)

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    STUDY.publish(find())
