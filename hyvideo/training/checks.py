"""The one check of a run's settings, before any model is loaded: what cannot work, and what is probably not meant.

It asks the code that will run with the settings instead of repeating what that knows.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.algorithms.grpo import lambda_bounds
from hyvideo.algorithms.policy import rollout_scheduler
from hyvideo.config.schema import Config, KLConfig, OptimizerConfig, RolloutConfig
from hyvideo.config.settings import SETTINGS, nearest, out_of_range, unmet_condition, value_of
from hyvideo.config.sizes import parse_size
from hyvideo.data.images import share_kept
from hyvideo.data.prompts import Prompt
from hyvideo.data.videos import MAX_VIDEO_BYTES
from hyvideo.distributed.layout import layout_of
from hyvideo.grpo.sde_window import noisy_steps
from hyvideo.grpo.timesteps import check_updates
from hyvideo.models.lora_keys import modules_of_original
from hyvideo.models.model_folder import is_diffusers_layout
from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.models.reward_models.rewards import WeightedReward, read_requested_rewards
from hyvideo.pipelines.sampling_defaults import FILE, sampling_defaults

_LAYOUT = ("sp_size", "dp_replicate", "batch_size", "num_generations", "gradient_accumulation_steps")
_STEPS = (
    *("grpo_sampling_steps", "infer_flow_shift_video", "sage_clamp", "eta", "sde_window_size", "sde_window_interval"),
    *("timestep_fraction", "updates_per_rollout", "batch_size", "gradient_accumulation_steps"),
)
_FEWEST_COMPARED = 8
"""Validation videos that a guard needs to tell a fall from chance."""
_WAITING = ("reward_batch_size", "remote_reward_timeout")

LEAST_KEPT = 0.75
"""Share of a first frame that cropping should leave: from 4:3 to 16:9 it is just that."""

MOST_NOISE_LEFT = 0.12
"""Standard deviation of the noise that finished latents of unit spread should hold at most; the paper's leave 0.08."""

MOST_EXCESS_NOISE = 1.15
"""How many times the schedule's noise the latents should hold at most on the way; the paper's sampler holds 1.11."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a run's settings.

    Attributes:
        text: setting, expected, received, and what to do.
        severity: an `error` stops the start; a `warning` is valid, but probably not meant.
    """

    text: str
    severity: Literal["error", "warning"] = "error"


def check(
    config: Config, world_size: int, vae_spatial: int = 16, vae_temporal: int = 4, *, files: bool = True
) -> list[Problem]:
    """Look for settings that could not run, or contradict each other; without such, for those that are hardly meant.

    Args:
        config: the configuration.
        world_size: number of ranks.
        vae_spatial: pixels per latent element, in height and width.
        vae_temporal: frames per latent frame, after the first.
        files: whether the prompts, the model's files and a checkpoint to resume must be there. Without them nothing is
            known of what is hardly meant.
    """
    errors = [
        *out_of_range(config),
        *_refusals(config, _LAYOUT, lambda: layout_of(config, world_size)),
        *_sharding_problems(config, world_size),
        *_refusals(config, _STEPS, lambda: _check_steps(config)),
        *_video_problems(config, vae_spatial, vae_temporal),
        *_rollout_problems(config),
        *_objective_problems(config),
        *_waiting_problems(config, world_size),
        *_guard_problems(config),
        *_model_problems(config),
        *_run_problems(config),
    ]
    known = None
    if files:
        errors += _file_problems(config)
        try:
            known = known_sampling(config)
        except ValueError as error:
            errors.append(str(error))
        errors += _guidance_problems(config, known)
    if errors or not files:
        return [Problem(error) for error in errors]
    return [Problem(warning, "warning") for warning in hardly_meant(config, known)]


def check_config(
    config: Config, world_size: int, vae_spatial: int = 16, vae_temporal: int = 4, *, files: bool = True
) -> list[str]:
    """Refuse a configuration that has an error; return its warnings. The arguments are those of `check`.

    Raises:
        ValueError: lists every error with its numbers and how to fix it.
    """
    problems = check(config, world_size, vae_spatial, vae_temporal, files=files)
    if errors := [problem.text for problem in problems if problem.severity == "error"]:
        listed = "\n".join(f"  - {error}" for error in errors)
        raise ValueError(f"the configuration cannot run on {world_size} rank(s):\n{listed}")
    return [problem.text for problem in problems]


def cropped_images(config: Config, prompts: Sequence[Prompt], valid: Sequence[Prompt]) -> list[str]:
    """Warn of first frames, for training or validation, of which cropping leaves little."""
    return [
        *_cropped("rollout_size", config.rollout.rollout_size, prompts),
        *_cropped("validation_fixed_size", config.validation.validation_fixed_size, valid),
    ]


def _guidance_problems(config: Config, known: Mapping[str, Any] | None) -> Iterator[str]:
    """Guidance for a distilled version, which has it in its weights already."""
    model = config.model
    distilled = known and known["guidance_scale"] == 1 and not is_diffusers_layout(Path(model.pretrained_model_root))
    if distilled and config.rollout.cfg_scale > 1:
        yield (
            f"cfg_scale is {config.rollout.cfg_scale:g}, but {model.pretrained_transformer_version} is distilled: its "
            "guidance is in its weights, and more of it spoils its videos. Set cfg_scale to 1."
        )


def hardly_meant(config: Config, known: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what is valid, but probably not meant, in settings without an error; `known` is of `known_sampling`."""
    yield from _weights(config)
    yield from _sampling(config, known)
    if algorithm_class(config.grpo.algorithm).needs == "transitions":
        yield from _noise_left(config, known)
    yield from _lambda(config.kl)
    yield from unread_settings(config)


def check_validated(config: Config, prompts: Sequence[Prompt], judge: WeightedReward | None = None) -> None:
    """Refuse a guard that compares too few validation videos, because of their files or of what its judge can judge.

    Args:
        config: the configuration.
        prompts: all rows of `valid_video_csv`.
        judge: the reward that judges the run; None if it is not yet built.

    Raises:
        ValueError: it says how many there are, and how many are needed.
    """
    if config.reward.reward_guard is None:
        return
    needed = f"but needs at least {_FEWEST_COMPARED}, better 32, to tell a fall from chance"
    if len(prompts) < _FEWEST_COMPARED:
        raise ValueError(
            f"reward_guard would compare {len(prompts)} validation videos, as valid_video_csv has no more prompts, "
            f"{needed}: add prompts."
        )
    texts = [prompt.text for prompt in prompts[: config.validation.validation_num_videos]]
    without = [text for text in texts if judge and not judge.applies(text)]
    if len(texts) - len(without) < _FEWEST_COMPARED:
        names = " and ".join(choice.name for choice in read_requested_rewards(config.reward, "reward_guard"))
        raise ValueError(
            f"reward_guard: {names} can judge the videos of only {len(texts) - len(without)} of the {len(texts)} "
            f"prompts that are validated, {needed}; it cannot judge {without[0]!r:.200}, for example. Validate other "
            "prompts, or name another judge."
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


def _check_steps(cfg: Config) -> None:
    """Ask the algorithm what it trains of one video, and deal that to updates."""
    trained = algorithm_class(cfg.grpo.algorithm).evaluations(cfg).update
    num_videos = cfg.grpo.batch_size * cfg.grpo.gradient_accumulation_steps
    check_updates(cfg.grpo.updates_per_rollout, num_videos, trained)


def _sharding_problems(cfg: Config, world_size: int) -> Iterator[str]:
    """Settings of shards where there are none."""
    if not cfg.parallel.enable_fsdp:
        if cfg.parallel.dp_replicate != 1:
            yield f"dp_replicate is {cfg.parallel.dp_replicate}, but nothing is sharded: set enable_fsdp"
        if "weights" in cfg.parallel.offload:
            yield "offload has weights, but nothing is sharded: set enable_fsdp"


def _video_problems(cfg: Config, vae_spatial: int, vae_temporal: int) -> Iterator[str]:
    """Frames and sizes that the VAE cannot encode."""
    for name, frames in (
        ("sample_n_frames", cfg.rollout.sample_n_frames),
        ("validate_video_length", cfg.validation.validate_video_length),
    ):
        if frames >= 1 and (frames - 1) % vae_temporal:
            lower = (frames - 1) // vae_temporal * vae_temporal + 1
            yield f"{name} is {frames}, but must be {vae_temporal}n + 1: use {lower} or {lower + vae_temporal}"
    for name, text, frames in (
        ("rollout_size", cfg.rollout.rollout_size, cfg.rollout.sample_n_frames),
        ("validation_fixed_size", cfg.validation.validation_fixed_size, cfg.validation.validate_video_length),
    ):
        try:
            size = parse_size(text)
        except ValueError as error:
            yield f"{name}: {error}"
            continue
        if any(side % vae_spatial for side in size):
            height, width = (max(1, round(side / vae_spatial)) * vae_spatial for side in size)
            yield (
                f"{name} is {text}, but height and width must be multiples of {vae_spatial}, the VAE's factor: use "
                f"{height}x{width}"
            )
        if (num_bytes := frames * math.prod(size) * 3) > MAX_VIDEO_BYTES:
            yield (
                f"{name} {text} with {frames} frames is {num_bytes / 2**30:,.1f} GiB per decoded video, but must be at "
                f"most {MAX_VIDEO_BYTES / 2**30:.0f}: take fewer or smaller frames"
            )


def _rollout_problems(cfg: Config) -> Iterator[str]:
    """A negative prompt without guidance."""
    rollout = cfg.rollout
    if not rollout.is_guided and rollout.negative_prompt:
        yield (
            f"negative_prompt is {rollout.negative_prompt!r}, but cfg_scale 1.0 switches guidance off and nothing "
            "would read it: set cfg_scale above 1, or negative_prompt to ''"
        )


def _objective_problems(cfg: Config) -> Iterator[str]:
    """A KL penalty without weight, reward weights that cannot rank videos, and a malformed server address."""
    kl, weights, url = cfg.kl, cfg.reward.reward_weights, cfg.reward.remote_reward_url
    if kl.kl_weight and kl.use_dual_kl and kl.dual_kl_moving_weight == 0 and kl.dual_kl_step_weight == 0:
        yield (
            "use_dual_kl is on, but dual_kl_moving_weight and dual_kl_step_weight are both 0: raise one, or set "
            "kl_weight to 0 for no KL penalty"
        )
    if not all(math.isfinite(weight) for weight in weights.values()):
        yield f"reward_weights must be finite numbers; received {weights}"
    elif not any(weights.values()):
        yield f"reward_weights needs at least one metric with a weight other than 0; received {weights}"
    if url is not None and not re.match(r"https?://[^/]", url):
        yield f"remote_reward_url must begin with http:// or https:// and name a host; received {url!r}"
    if cfg.reward.reward_checkpoint_path is not None and (cfg.reward.reward_config or url):
        yield (
            f"reward_checkpoint_path is {cfg.reward.reward_checkpoint_path!r}, but nothing would load it: a server has "
            "its own weights, and reward_config names those of each reward in its options"
        )


def _waiting_problems(cfg: Config, world_size: int) -> Iterator[str]:
    """Timeouts that let a rank wait longer for a server of reward or judge than the others wait for this rank."""
    reward, limit = cfg.reward, cfg.parallel.collective_timeout
    timeout, block = reward.remote_reward_timeout, reward.reward_batch_size
    retries, in_flight = RewardContext.retries, RewardContext.in_flight
    trains = _asks_server(reward.reward_config or {}, reward.remote_reward_url)
    judges = reward.reward_guard is not None and _asks_server(reward.reward_guard, reward.remote_reward_url)
    if world_size == 1 or not (trains or judges) or any(out_of_range(cfg, *_WAITING)):
        return
    try:
        layout = layout_of(cfg, world_size)
    except ValueError:
        return  # told already
    validated = cfg.validation.is_on * layout.most_to_sample(cfg.validation.validation_num_videos)
    videos = layout.most_to_score(max(trains * layout.num_own_videos, validated))
    times = math.ceil(math.ceil(videos / block) / in_flight)
    seconds = times * (timeout * (retries + 1) + 0.5 * (2.0**retries - 1))  # waits double from half a second
    if seconds >= limit:
        yield (
            f"remote_reward_timeout {timeout:g} lets a rank wait {seconds:g} s for a server ({retries + 1} attempts "
            f"and the waits between them, {times} times, as at most {in_flight} requests of {block} of its {videos} "
            f"videos are in flight), but the others wait for it only collective_timeout {limit} s: lower the first "
            f"one, or set collective_timeout above {seconds:g}"
        )


def _guard_problems(cfg: Config) -> Iterator[str]:
    """A guard whose judge cannot be read, that would never look, or could not tell a fall."""
    if cfg.reward.reward_guard is None:
        return
    try:
        read_requested_rewards(cfg.reward, "reward_guard")
    except ValueError as error:
        yield str(error)
    if not cfg.validation.validation_interval:
        yield "reward_guard judges validation videos, but validation_interval is 0: set an interval"
    if cfg.validation.validation_num_videos < _FEWEST_COMPARED:
        yield (
            f"reward_guard compares {cfg.validation.validation_num_videos} validation videos, too few to tell a fall "
            f"from chance: set validation_num_videos to at least {_FEWEST_COMPARED}, better 32"
        )


def _asks_server(rewards: Mapping[str, Any], url: str | None) -> bool:
    """Whether a server scores, as far as rewards that are not yet checked can be understood."""
    models = rewards.get("models")
    if not isinstance(models, Mapping):
        return url is not None
    return any(entry.get("url", url) is not None for entry in models.values() if isinstance(entry, Mapping))


def _csv_problems(name: str, paths: Sequence[str], advice: str) -> Iterator[str]:
    """A CSV setting without files, or with files that are not there."""
    if not paths:
        yield f"{name} is empty: {advice}"
    for path in paths:
        if not Path(path).is_file():
            yield f"{name}: there is no file {path!r}"


def _file_problems(cfg: Config) -> Iterator[str]:
    """Inputs that are missing on disk. The model's own files are checked by its loader."""
    advice = (
        "give one or more CSVs with a prompt column (starter prompts: assets/prompts/train.csv; the release's "
        "own are not here)"
    )
    yield from _csv_problems("train_video_csv", cfg.data.train_video_csv, advice)
    if cfg.validation.is_on:
        advice = "give one or more CSVs, or set validation_interval to 0 (and validate_at_step0 to false)"
        yield from _csv_problems("valid_video_csv", cfg.data.valid_video_csv, advice)
    checkpoint = cfg.run.resume_from_checkpoint
    if checkpoint not in (None, "latest") and not Path(checkpoint).exists():
        yield f"resume_from_checkpoint: there is no checkpoint {checkpoint!r}; give its path, or `latest`"


def _model_problems(cfg: Config) -> Iterator[str]:
    """Settings of adapter and precision that contradict each other or the method."""
    model, path = cfg.model, cfg.model.pretrained_lora_path
    joined = any("proj_out" in (name, modules_of_original(name)) for name in model.lora_target_modules)
    if model.use_lora and cfg.parallel.sp_size > 1 and joined:
        yield (
            f"lora_target_modules has proj_out, where the ranks of a video join its tokens (sp_size "
            f"{cfg.parallel.sp_size}): leave it out, or set sp_size to 1"
        )
    if model.use_lora and not model.lora_target_modules:
        yield "lora_target_modules is empty, but with use_lora at least one layer needs an adapter"
    if path is not None and not model.use_lora:
        yield f"pretrained_lora_path is {path!r}, but use_lora is false and nothing would load it: set use_lora"
    if path is not None and not Path(path).is_dir():
        yield f"pretrained_lora_path: there is no folder {path!r}"
    if cfg.optimizer.ema_decay and cfg.model.master_weight_type == "bf16" and not model.use_lora:
        yield "ema_decay averages bf16 weights, which would round most of it away: set master_weight_type to fp32"
    if cfg.model.dtype == "fp32" and cfg.model.master_weight_type == "bf16":
        yield "dtype fp32 computes with fp32 weights, but master_weight_type is bf16: set both to one of them"


def _run_problems(cfg: Config) -> Iterator[str]:
    """Names that are empty, not a folder name, or not a setting."""
    for setting in cfg.run.resume_may_change:
        if setting not in SETTINGS:
            yield f"resume_may_change: {setting!r} is not a setting; the nearest is {nearest(setting, SETTINGS)!r}"
    name = cfg.run.run_name
    if name is not None and not re.fullmatch(r"[^/\\\0]+", name):
        yield f"run_name must be one folder name without slashes; received {name!r}"
    if cfg.run.output_dir == "":
        yield "output_dir is empty: give a folder, or leave it out for outputs/<run_name>-<time>"


def unread_settings(config: Config) -> Iterator[str]:
    """Settings that were changed, though another one keeps them from being read."""
    unread: dict[str, list[str]] = {}
    for name, setting in SETTINGS.items():
        if (value := value_of(config, name)) != setting.default and (condition := unmet_condition(config, setting)):
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
            "it). Use fp32 with more ranks, offload weights, or use_lora, whose weights are fp32 always."
        )
    if model.use_lora and rate <= OptimizerConfig.learning_rate:  # the default
        yield (
            f"use_lora is true at learning_rate {rate:g}, the rate of full fine-tuning, at which an adapter hardly "
            "learns: add configs/lora.yaml to --config, or set a rate about ten times as high."
        )


def _sampling(config: Config, known: Mapping[str, Any] | None) -> Iterator[str]:
    """Settings that differ from how the model is meant to be sampled."""
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
