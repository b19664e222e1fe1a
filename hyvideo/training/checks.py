"""The one check of a run's settings, before any model is loaded: what cannot work, and what is probably not meant.

It asks the code that will run with the settings instead of repeating what that knows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.algorithms.policy import rollout_scheduler
from hyvideo.config.schema import Config, OptimizerConfig, RolloutConfig
from hyvideo.config.settings import SETTINGS, nearest, out_of_range, parse_size, unmet_condition, value_of
from hyvideo.data.prompts import Prompt
from hyvideo.data.videos import MAX_VIDEO_BYTES
from hyvideo.distributed.mesh import layout_of
from hyvideo.evaluation.drift import LOOKS
from hyvideo.grpo.timesteps import check_updates, noisy_steps
from hyvideo.models.lora_keys import modules_of_original
from hyvideo.models.model_folder import is_diffusers_layout
from hyvideo.models.reward_models.rewards import WeightedReward, read_requested_rewards
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import check_video_shape
from hyvideo.pipelines.sampling_defaults import FILE, sampling_defaults

_LAYOUT = ("sp_size", "dp_replicate", "batch_size", "num_generations", "gradient_accumulation_steps")
_STEPS = (
    *("grpo_sampling_steps", "infer_flow_shift_video", "sage_clamp", "eta", "sde_window_size", "sde_window_interval"),
    *("timestep_fraction", "updates_per_rollout", "batch_size", "gradient_accumulation_steps"),
)
_FEWEST_COMPARED = 8
"""Validation videos that a guard needs to tell a fall from chance."""

MOST_NOISE_LEFT = 0.12
"""Standard deviation of the noise that finished latents of unit spread should hold at most; the paper's leave 0.08."""

MOST_EXCESS_NOISE = 1.15
"""How many times the schedule's noise the latents should hold at most on the way; the paper's sampler holds 1.11."""


def check_config(
    config: Config, world_size: int, vae_spatial: int = 16, vae_temporal: int = 4, *, files: bool = True
) -> list[str]:
    """Refuse, by a ValueError that lists every error, settings that could not run, or contradict each other.

    Return warnings of those that are hardly meant. Either says setting, expected, received, and what to do. The VAE
    makes a latent element of `vae_spatial` pixels in height and width, and a latent frame of `vae_temporal` frames,
    after the first. Without `files` neither the prompts nor the model's files nor a checkpoint to resume need be there,
    and nothing is known of what is hardly meant.
    """
    grpo = config.grpo

    def deal() -> None:
        trained = algorithm_class(grpo.algorithm).evaluations(config).trained
        check_updates(grpo.updates_per_rollout, grpo.batch_size * grpo.gradient_accumulation_steps, trained)

    errors = [
        *out_of_range(config),
        *_refusals(config, _LAYOUT, lambda: layout_of(config, world_size)),
        *_refusals(config, _STEPS, deal),
        *_video_problems(config, vae_spatial, vae_temporal),
        *_contradictions(config),
    ]
    known = None
    if files:
        if not config.data.train_video_csv:
            errors.append(
                "train_video_csv is empty: give CSVs with a prompt column (starter prompts: assets/prompts/train.csv)"
            )
        if config.validation.is_on and not config.data.valid_video_csv:
            advice = "give CSVs, or set validation_interval to 0 (and validate_at_step0 to false)"
            errors.append(f"valid_video_csv is empty: {advice}")
        try:
            known = known_sampling(config)
        except ValueError as error:
            errors.append(str(error))
        model, scale = config.model, config.rollout.cfg_scale
        original = not is_diffusers_layout(Path(model.pretrained_model_root))
        if known and known["guidance_scale"] == 1 and original and scale > 1:
            errors.append(
                f"cfg_scale is {scale:g}, but {model.pretrained_transformer_version} is distilled: its guidance is in "
                "its weights, and more of it spoils its videos. Set cfg_scale to 1."
            )
    if errors:
        listed = "\n".join(f"  - {error}" for error in errors)
        raise ValueError(f"the configuration cannot run on {world_size} rank(s):\n{listed}")
    return list(hardly_meant(config, known)) if files else []


FELT_KL = 1e-4
"""Lambda above which the KL term may be felt: the paper has 1e-5, where it is about 3e-4 of the policy's gradient."""


def hardly_meant(config: Config, known: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what is valid, but probably not meant, in settings without an error; `known` is of `known_sampling`."""
    model, rate = config.model, config.optimizer.learning_rate
    if model.master_weight_type == "bf16" and not model.use_lora:
        yield (
            f"master_weight_type is bf16 and all weights are trained at learning_rate {rate:g}: most updates are "
            "rounded away (60 equal ones at 1e-5 changed 2 % of a matrix with Muon, 16 % with AdamW, in fp32 all of "
            "it). Use fp32 with more ranks, offload weights, or use_lora, whose weights are fp32 always."
        )
    if model.use_lora and rate <= OptimizerConfig.learning_rate:  # the default
        yield (
            f"use_lora is true at learning_rate {rate:g}, the rate of full fine-tuning, at which an adapter hardly "
            "learns: add configs/lora.yaml to --config, or set a rate about ten times as high."
        )
    if known:
        shifts = {"infer_flow_shift_video": config.rollout.infer_flow_shift_video}
        if config.data.valid_video_csv and config.validation.is_on:
            shifts["validation_timestep_shift"] = config.validation.validation_timestep_shift
        if shifts.get("validation_timestep_shift") == known["shift"]:
            del shifts["infer_flow_shift_video"]  # rollouts may differ on purpose (configs/demo.yaml)
        pairs = [("cfg_scale", config.rollout.cfg_scale, known["guidance_scale"])]
        pairs += [(name, shift, known["shift"]) for name, shift in shifts.items()]
        if differing := [f"{name} is {own:g}, the model's is {its:g}" for name, own, its in pairs if own != its]:
            yield f"the model is meant to be sampled otherwise: {'; '.join(differing)}."
    algorithm = algorithm_class(config.grpo.algorithm)
    if algorithm.needs == "transitions":
        yield from _noise_left(config, known)
        passes = algorithm.evaluations(config)
        if config.kl.kl_weight > FELT_KL and 0 < passes.anchor < passes.trained:
            yield (
                f"anchor_fraction is {config.kl.anchor_fraction:g} at kl_weight {config.kl.kl_weight:g}: the position "
                f"term, which is felt there, rests on {passes.anchor} of {passes.trained} steps, so its gradient has "
                f"about {math.sqrt(passes.trained / passes.anchor):.1f} times the noise. kl/gradient_share says how "
                "much it weighs; 1 compares all steps."
            )
    yield from unread_settings(config)


def check_validated(config: Config, prompts: Sequence[Prompt], judge: WeightedReward | None = None) -> None:
    """Refuse, by a ValueError, a guard that would compare too few videos for its judge, or, without one, prompts.

    `prompts` are all rows of `valid_video_csv`; the judge is None if it is not yet built.
    """
    if config.reward.reward_guard is None and not config.reward.drift_guard:
        return
    texts = [prompt.text for prompt in prompts[: config.validation.validation_num_videos]]
    without = [text for text in texts if judge and not judge.applies(text)]
    compared, what = len(texts) - len(without), "validation videos that its judge can judge"
    if config.reward.reward_guard is None:
        compared, what = len({*texts}), "different validation prompts"
    if compared < _FEWEST_COMPARED:
        example = f" (not {without[0]!r:.200}, for example)" if without else ""
        raise ValueError(
            f"The guard would compare {compared} {what}{example}, but needs at least {_FEWEST_COMPARED}, better 32, to "
            "tell a fall from chance: add prompts to valid_video_csv, or raise validation_num_videos."
        )


def known_sampling(config: Config) -> Mapping[str, Any] | None:
    """Return how the model is meant to be sampled; None without a folder, or where it does not say it."""
    root = Path(config.model.pretrained_model_root)
    if not root.is_dir() or (is_diffusers_layout(root) and not (root / FILE).is_file()):
        return None
    return sampling_defaults(root, config.model.pretrained_transformer_version)


def _refusals(cfg: Config, names: Sequence[str], ask: Callable[[], object]) -> Iterator[str]:
    """Yield why a part of the run refuses its settings, unless one of them is out of its own range already."""
    if any(out_of_range(cfg, *names)):
        return
    try:
        ask()
    except ValueError as error:
        yield from str(error).splitlines()


def _video_problems(cfg: Config, vae_spatial: int, vae_temporal: int) -> Iterator[str]:
    """Frames and sizes that the VAE cannot encode, and videos that are too large."""
    rollout, validation = cfg.rollout, cfg.validation
    for names, frames, text in (
        ("sample_n_frames and rollout_size", rollout.sample_n_frames, rollout.rollout_size),
        (
            "validate_video_length and validation_fixed_size",
            validation.validate_video_length,
            validation.validation_fixed_size,
        ),
    ):
        try:
            size = parse_size(text)
            if frames >= 1:
                check_video_shape(frames, size, temporal=vae_temporal, spatial=vae_spatial)
        except ValueError as error:
            yield f"{names}: {error}"
        else:
            if (num_bytes := frames * math.prod(size) * 3) > MAX_VIDEO_BYTES:
                yield (
                    f"{names}: {frames} frames of {text} are {num_bytes / 2**30:,.1f} GiB per decoded video, but must "
                    f"be at most {MAX_VIDEO_BYTES / 2**30:.0f}: take fewer or smaller frames"
                )


def _contradictions(cfg: Config) -> Iterator[str]:
    """Settings that contradict each other or the method, and names that are no setting."""
    reward, weights = cfg.reward, cfg.reward.reward_weights
    if not (all(math.isfinite(weight) for weight in weights.values()) and any(weights.values())):
        yield f"reward_weights must be finite numbers, at least one other than 0; received {weights}"
    if reward.reward_checkpoint_path is not None and (reward.reward_config or reward.remote_reward_url):
        yield (
            f"reward_checkpoint_path is {reward.reward_checkpoint_path!r}, but nothing would load it: a server has "
            "its own weights, and reward_config names those of each reward in its options"
        )
    if reward.reward_guard is not None:
        try:
            read_requested_rewards(reward, "reward_guard")
        except ValueError as error:
            yield str(error)
        if not cfg.validation.validation_interval:
            yield "reward_guard judges validation videos, but validation_interval is 0: set an interval"
    validation, watched = cfg.validation, reward.drift_guard
    if unknown := {name: share for name, share in watched.items() if name not in LOOKS or not 0 < share <= 1}:
        yield f"drift_guard takes shares in (0, 1] of the spreads of {', '.join(LOOKS)}; received {unknown}"
    if watched and not (validation.validate_at_step0 and validation.validation_interval):
        yield (
            "drift_guard compares validation videos with those before training: set validate_at_step0 true and a "
            f"validation_interval; received {validation.validate_at_step0} and {validation.validation_interval}"
        )
    model, path = cfg.model, cfg.model.pretrained_lora_path
    joined = any("proj_out" in (name, modules_of_original(name)) for name in model.lora_target_modules)
    if model.use_lora and cfg.parallel.sp_size > 1 and joined:
        yield (
            f"lora_target_modules has proj_out, where the ranks of a video join its tokens (sp_size "
            f"{cfg.parallel.sp_size}): leave it out, or set sp_size to 1"
        )
    if path is not None and not model.use_lora:
        yield f"pretrained_lora_path is {path!r}, but use_lora is false and nothing would load it: set use_lora"
    if cfg.optimizer.ema_decay and cfg.model.master_weight_type == "bf16" and not model.use_lora:
        yield "ema_decay averages bf16 weights, which would round most of it away: set master_weight_type to fp32"
    if cfg.model.dtype == "fp32" and cfg.model.master_weight_type == "bf16":
        yield "dtype fp32 computes with fp32 weights, but master_weight_type is bf16: set both to one of them"
    for setting in cfg.run.resume_may_change:
        if setting not in SETTINGS:
            yield f"resume_may_change: {setting!r} is not a setting; the nearest is {nearest(setting, SETTINGS)!r}"


def unread_settings(config: Config) -> Iterator[str]:
    """Settings that were changed, though another one keeps them from being read."""
    unread: dict[str, list[str]] = {}
    for name, setting in SETTINGS.items():
        if (value := value_of(config, name)) != setting.default and (condition := unmet_condition(config, setting)):
            unread.setdefault(condition, []).append(f"{name} {value}")
    for condition, changed in unread.items():
        yield f"nothing reads {', '.join(changed)}: only runs with {condition} do."


def noise_left(rollout: RolloutConfig) -> tuple[float, float]:
    """Return how much noise rollouts hold beyond the schedule, were the velocity exact.

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


def _noise_left(config: Config, known: Mapping[str, Any] | None) -> Iterator[str]:
    """A sampler that leaves its videos noisier than any that the model has learnt from."""
    rollout, most = config.rollout, (MOST_EXCESS_NOISE, MOST_NOISE_LEFT)
    if known:  # the paper trains with 20 of its model's 50 steps: the same share of these
        steps = math.ceil(0.4 * known["num_inference_steps"])
        papers = RolloutConfig(grpo_sampling_steps=steps, infer_flow_shift_video=known["shift"])
        most = tuple(map(max, most, noise_left(papers)))
    excess, left = noise_left(rollout)
    if is_usual_noise(excess, left, most):
        return
    yield (
        f"{rollout.sde_type} with eta {rollout.eta:g} and {rollout.grpo_sampling_steps} steps leaves noise of standard "
        f"deviation {left:.2f} in the finished latents (usual is at most {most[1]:.2f}), and on the way up to "
        f"{excess:.2f} times the schedule's noise (at most {most[0]:.2f}). The network takes it for a part of the "
        "video, so scores fall: see rollout/ode_gap. Lower eta, raise grpo_sampling_steps, or take sde_type cps."
    )


def is_usual_noise(excess: float, left: float, most: Sequence[float] = (MOST_EXCESS_NOISE, MOST_NOISE_LEFT)) -> bool:
    """Whether rollouts hold about as little noise, as `noise_left` measures it, as those of the paper."""
    return excess <= most[0] and left <= most[1]
