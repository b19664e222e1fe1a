"""Warnings about settings that are valid but probably not intended. A run prints them when it starts."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.algorithms.grpo import lambda_bounds
from hyvideo.algorithms.policy import rollout_scheduler
from hyvideo.config.knobs import KNOBS, unmet_condition, value_of
from hyvideo.config.schema import Config, KLConfig, OptimizerConfig, RolloutConfig
from hyvideo.config.sizes import parse_size
from hyvideo.data.images import share_kept
from hyvideo.data.prompts import Prompt
from hyvideo.grpo.sde_window import noisy_steps
from hyvideo.training.checks import known_sampling

LEAST_KEPT = 0.75
"""Share of a first frame that cropping should leave: from 4:3 to 16:9 it is just that."""

MOST_NOISE_LEFT = 0.12
"""Standard deviation of the noise that finished latents of unit spread should hold at most; the paper's leave 0.08."""

MOST_EXCESS_NOISE = 1.15
"""How many times the schedule's noise the latents should hold at most on the way; the paper's sampler holds 1.11."""


def warnings_about_settings(config: Config, prompts: Sequence[Prompt], valid: Sequence[Prompt]) -> Iterator[str]:
    """Yield what a person may want to change before a run with these checked settings and prompts goes on."""
    yield from _weights(config)
    yield from _sampling(config)
    if algorithm_class(config.grpo.algorithm).needs == "transitions":
        yield from _noise_left(config)
    yield from _lambda(config.kl)
    yield from unread_settings(config)
    yield from _cropped("rollout_size", config.rollout.rollout_size, prompts)
    yield from _cropped("validation_fixed_size", config.validation.validation_fixed_size, valid)


def videos_together(config: Config) -> int:
    """Return how many of a round's videos one rank denoises together (`hyvideo.training.collect`)."""
    videos = config.grpo.batch_size * config.grpo.gradient_accumulation_steps
    return min(config.rollout.rollout_micro_batch_size or videos, videos)


def unread_settings(config: Config) -> Iterator[str]:
    """Settings that were changed, though another one keeps them from being read."""
    unread: dict[str, list[str]] = {}
    for name, knob in KNOBS.items():
        if (value := value_of(config, name)) != knob.default and (condition := unmet_condition(config, knob)):
            unread.setdefault(condition, []).append(f"{name} {value}")
    for condition, changed in unread.items():
        yield f"nothing reads {', '.join(changed)}: only runs with {condition} do."


def _weights(config: Config) -> Iterator[str]:
    """Learning rates whose steps are rounded away, or hardly move an adapter."""
    model, rate = config.model, config.optimizer.learning_rate
    if model.master_weight_type == "bf16" and not model.use_lora:
        yield (
            f"master_weight_type is bf16 and all weights are trained at learning_rate {rate:g}: most updates are "
            "rounded away (60 equal ones at 1e-5 changed 2 % of a matrix with Muon, 16 % with AdamW, in fp32 all of "
            "it). Use fp32 with more ranks or cpu_offload, or use_lora, whose weights are fp32 always."
        )
    if model.use_lora and rate <= OptimizerConfig.learning_rate:  # the default
        yield (
            f"use_lora is true at learning_rate {rate:g}, the rate of full fine-tuning, at which an adapter hardly "
            "learns: add configs/lora.yaml to --config, or set a rate about ten times as high."
        )


def _sampling(config: Config) -> Iterator[str]:
    """Settings that differ from how the model is meant to be sampled."""
    known = known_sampling(config)
    if known is None:
        return
    pairs = [("cfg_scale", config.rollout.cfg_scale, known["guidance_scale"])]
    pairs += [("infer_flow_shift_video", config.rollout.infer_flow_shift_video, known["shift"])]
    if config.data.valid_video_csv and config.validation.is_on:
        pairs += [("validation_timestep_shift", config.validation.validation_timestep_shift, known["shift"])]
    differing = [f"{name} is {ours:g}, the model's is {theirs:g}" for name, ours, theirs in pairs if ours != theirs]
    if differing:
        yield f"the model is meant to be sampled otherwise: {'; '.join(differing)}."


def noise_left(rollout: RolloutConfig) -> tuple[float, float]:
    """Return how much noise rollouts hold beyond the schedule, were the velocity exact.

    Returns:
        The most on the way, as a multiple of the schedule's, and the standard deviation in the finished latents; of all
        places where a window of noisy steps can stand, the worst.
    """
    scheduler = rollout_scheduler(rollout)
    flavour = {"sde_type": rollout.sde_type, "eta": rollout.eta}
    stochastic = scheduler.trained_steps(**flavour)
    moves = rollout.sde_window in ("sliding", "per_group")
    windows = [
        noisy_steps(
            stochastic,
            "sliding" if moves else rollout.sde_window,
            rollout.sde_window_size,
            num_samples=1,
            num_generations=1,
            round_index=place,
            interval=1,
            generator=torch.Generator(),
        )
        for place in range(int(stochastic.sum()) - rollout.sde_window_size + 1 if moves else 1)
    ]
    left = scheduler.noise_left(**flavour, noisy=torch.cat(windows))
    excess = left[:, :-1] / scheduler.sigmas[1:-1]
    return float(excess.max()) if excess.numel() else 1.0, float(left[:, -1].max())


def _noise_left(config: Config) -> Iterator[str]:
    """A sampler that leaves its videos noisier than any that the model has learnt from."""
    rollout, most = config.rollout, (MOST_EXCESS_NOISE, MOST_NOISE_LEFT)
    if known := known_sampling(config):  # the paper trains with 20 of its model's 50 steps: the same share of these
        steps = math.ceil(0.4 * known["num_inference_steps"])
        papers = RolloutConfig(grpo_sampling_steps=steps, infer_flow_shift_video=known["shift"])
        most = tuple(map(max, most, noise_left(papers)))
    excess, left = noise_left(rollout)
    if is_usual_noise(excess, left, most):
        return
    steps = rollout.grpo_sampling_steps
    cures = {
        "eta": [rollout.eta * tenths / 10 for tenths in range(9, 0, -1)],
        "grpo_sampling_steps": range(steps, 4 * steps),
    }
    mended = []
    for name, values in cures.items():
        cured = (value for value in values if is_usual_noise(*noise_left(replace(rollout, **{name: value})), most))
        mended += [f"{name} {value:g}" for value in itertools.islice(cured, 1)]
    yield (
        f"{rollout.sde_type} with eta {rollout.eta:g} and {steps} steps leaves noise of standard deviation {left:.2f} "
        f"in the finished latents (usual is at most {most[1]:.2f}), and on the way up to {excess:.2f} times the "
        f"schedule's noise (at most {most[0]:.2f}). The network takes it for a part of the video, so scores "
        f"fall: see rollout/ode_gap. One of these would be enough: {', '.join([*mended, 'sde_type cps'])}."
    )


def is_usual_noise(excess: float, left: float, most: Sequence[float] = (MOST_EXCESS_NOISE, MOST_NOISE_LEFT)) -> bool:
    """Whether rollouts hold about as little noise, as `noise_left` measures it, as those of the paper."""
    return excess <= most[0] and left <= most[1]


def _lambda(kl: KLConfig) -> Iterator[str]:
    """Values of lambda that its ceiling does not allow."""
    if kl.kl_weight == 0 or kl.kl_schedule == "fixed":
        return
    lowest, first = lambda_bounds(kl)
    pairs = [("kl_min_coef", kl.kl_min_coef, lowest), ("kl_coef", first if kl.kl_coef is None else kl.kl_coef, first)]
    for name, given, taken in pairs:
        if given != taken:
            yield f"{name} is {given:g}, but kl_weight {kl.kl_weight:g} with {kl.kl_schedule} allows {taken:g}."


def _cropped(name: str, size: str, prompts: Sequence[Prompt]) -> Iterator[str]:
    """First frames of which cropping to the one size of all videos leaves little."""
    paths = dict.fromkeys(prompt.ref_image_path for prompt in prompts if prompt.ref_image_path)
    kept = {path: share_kept(path, parse_size(size)) for path in paths}
    if few := [path for path in kept if kept[path] < LEAST_KEPT]:
        worst = min(few, key=kept.get)
        yield (
            f"{len(few)} of {len(kept)} first frames keep less than {LEAST_KEPT:.0%} of their area when they are "
            f"cropped to {name} {size}, the least {kept[worst]:.0%} of '{worst}': all videos of a run have one size. "
            "Choose images, or a size, of one aspect ratio."
        )
