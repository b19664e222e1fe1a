"""Cross-field rules, checked before any model is loaded: one message lists everything that is wrong."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hyvideo.config.knobs import KNOBS, nearest, out_of_range
from hyvideo.config.schema import Config, RewardConfig
from hyvideo.config.sizes import parse_size


def check_config(
    cfg: Config, world_size: int, vae_spatial: int = 16, vae_temporal: int = 4, *, files: bool = True
) -> None:
    """Refuse a configuration that could not run, or whose settings contradict each other.

    Args:
        cfg: the configuration.
        world_size: number of ranks.
        vae_spatial: pixels per latent element, in height and width.
        vae_temporal: frames per latent frame, after the first.
        files: whether the prompts, and a checkpoint to resume, must be there.

    Raises:
        ValueError: lists every violated rule with its numbers and how to fix it.
    """
    problems = [
        *out_of_range(cfg),
        *_rank_problems(cfg, world_size),
        *_update_problems(cfg),
        *_video_problems(cfg, vae_spatial, vae_temporal),
        *_guidance_problems(cfg),
        *_trust_region_problems(cfg),
        *_reward_problems(cfg),
        *_waiting_problems(cfg, world_size),
        *(_file_problems(cfg) if files else ()),
        *_lora_problems(cfg),
        *_precision_problems(cfg),
        *_run_problems(cfg),
    ]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(f"the configuration cannot run on {world_size} rank(s):\n{listed}")


def _divisors(number: int) -> str:
    """The divisors of a number up to 1024, listed."""
    return ", ".join(str(n) for n in range(1, min(number, 1024) + 1) if number % n == 0)


def _rank_problems(cfg: Config, world_size: int) -> Iterator[str]:
    """Ranks that do not divide into sequence-parallel groups, replicas and prompt groups."""
    sp_size, batch, group = cfg.parallel.sp_size, cfg.grpo.batch_size, cfg.grpo.num_generations
    if not cfg.parallel.enable_fsdp:
        for name, idle in (("dp_replicate", 1), ("cpu_offload", False)):
            if getattr(cfg.parallel, name) != idle:
                yield f"{name} is {getattr(cfg.parallel, name)}, but nothing is sharded: set enable_fsdp"
    elif world_size == 1 and cfg.parallel.cpu_offload:
        yield "cpu_offload is True, but one process has no shards that could leave the device: start two or more"
    if min(sp_size, batch, group, cfg.parallel.dp_replicate) < 1:
        return  # an interval is already violated
    if world_size % sp_size:
        yield (
            f"world size {world_size} is not divisible by sp_size {sp_size}: set sp_size to one of "
            f"{_divisors(world_size)}"
        )
        return
    dp_degree = world_size // sp_size
    if dp_degree % cfg.parallel.dp_replicate:
        yield (
            f"the data-parallel degree {dp_degree} (world size {world_size} / sp_size {sp_size}) is not divisible by "
            f"dp_replicate {cfg.parallel.dp_replicate}: set dp_replicate to one of {_divisors(dp_degree)}"
        )
    if batch % group and group % batch:
        yield (
            f"batch_size {batch} and num_generations {group} must divide one another, so that prompt groups tile the "
            f"ranks: set batch_size to a multiple of {group} or to one of {_divisors(group)}"
        )
    elif batch * dp_degree % group:
        yield (
            f"one rollout has batch_size {batch} x {dp_degree} data-parallel ranks (world size {world_size} / sp_size "
            f"{sp_size}) = {batch * dp_degree} videos, not a multiple of num_generations {group}: set batch_size to a "
            f"multiple of {group}, or num_generations to a divisor of {batch * dp_degree}"
        )


def _update_problems(cfg: Config) -> Iterator[str]:
    """More updates than there are (video, step) pairs to split over them."""
    grpo, num_steps = cfg.grpo, cfg.rollout.grpo_sampling_steps
    num_videos = grpo.batch_size * grpo.gradient_accumulation_steps
    if min(num_videos, num_steps) < 1 or not 0 < grpo.timestep_fraction <= 1:
        return  # an interval is already violated
    stochastic = num_steps - 1 if cfg.rollout.sde_type == "cps" else num_steps
    if stochastic < 1:
        yield "grpo_sampling_steps is 1, but the last step of sde_type cps is deterministic: use at least 2 steps"
        return
    noisy = stochastic if cfg.rollout.sde_window == "all" else cfg.rollout.sde_window_size
    if noisy > stochastic:
        yield (
            f"sde_window_size is {noisy}, but only {stochastic} of {num_steps} denoising steps can draw noise: lower "
            "it, or set sde_window to all"
        )
        return
    trained = max(1, math.floor(grpo.timestep_fraction * noisy + 1e-9))
    if grpo.updates_per_rollout > num_videos * trained:
        yield (
            f"updates_per_rollout is {grpo.updates_per_rollout}, but a rank has batch_size {grpo.batch_size} x "
            f"gradient_accumulation_steps {grpo.gradient_accumulation_steps} x {trained} trained steps = "
            f"{num_videos * trained} (video, step) pairs to split: lower it to that"
        )


def _video_problems(cfg: Config, vae_spatial: int, vae_temporal: int) -> Iterator[str]:
    """Frames and sizes that the VAE cannot encode."""
    for name, frames in (
        ("sample_n_frames", cfg.rollout.sample_n_frames),
        ("validate_video_length", cfg.validation.validate_video_length),
    ):
        if frames >= 1 and (frames - 1) % vae_temporal:
            lower = (frames - 1) // vae_temporal * vae_temporal + 1
            yield f"{name} is {frames}, but must be {vae_temporal}n + 1: use {lower} or {lower + vae_temporal}"
    for name, text in (
        ("rollout_size", cfg.rollout.rollout_size),
        ("validation_fixed_size", cfg.validation.validation_fixed_size),
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


def _guidance_problems(cfg: Config) -> Iterator[str]:
    """Exploration and guidance settings that contradict each other."""
    rollout = cfg.rollout
    if rollout.cfg_scale == 1.0 and rollout.negative_prompt:
        yield (
            f"negative_prompt is {rollout.negative_prompt!r}, but cfg_scale 1.0 switches guidance off and nothing "
            "would read it: set cfg_scale above 1, or negative_prompt to ''"
        )
    if rollout.sde_type == "cps" and rollout.eta > 1:
        yield f"eta is {rollout.eta}, but sde_type cps takes it as a share of a right angle, at most 1"


def _trust_region_problems(cfg: Config) -> Iterator[str]:
    """KL settings that contradict each other; with kl_weight 0 none of them is used."""
    kl = cfg.kl
    if kl.kl_weight == 0:
        return
    ceiling = kl.kl_weight * (0.1 if kl.kl_schedule == "milder" else 1)
    start = kl.kl_min_coef if kl.kl_coef is None else kl.kl_coef
    if kl.kl_schedule != "fixed" and not kl.kl_min_coef <= start <= ceiling:
        yield (
            f"kl_min_coef {kl.kl_min_coef}, kl_coef {start} and the ceiling {ceiling:g} (kl_weight; a tenth of it for "
            "milder) must rise in this order: lower the first ones, or set kl_weight to 0 for no KL penalty"
        )
    if kl.use_dual_kl and kl.dual_kl_moving_weight == 0 and kl.dual_kl_step_weight == 0:
        yield (
            "use_dual_kl is on, but dual_kl_moving_weight and dual_kl_step_weight are both 0: raise one, or set "
            "kl_weight to 0 for no KL penalty"
        )


def _reward_problems(cfg: Config) -> Iterator[str]:
    """Reward weights that cannot rank videos, and a malformed server address."""
    weights, url = cfg.reward.reward_weights, cfg.reward.remote_reward_url
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
    """A reward server's silence that ranks without videos to score would not outwait."""
    reward, limit, sp_size = cfg.reward, cfg.parallel.collective_timeout, cfg.parallel.sp_size
    timeout, retries = reward.remote_reward_timeout, reward.remote_reward_retries
    block, in_flight = reward.reward_batch_size, reward.remote_reward_in_flight
    if world_size == 1 or not _asks_server(reward) or min(sp_size, block, in_flight) < 1:
        return
    validated = cfg.validation.is_on * math.ceil(cfg.validation.validation_num_videos / max(1, world_size // sp_size))
    trained = cfg.grpo.batch_size * cfg.grpo.gradient_accumulation_steps
    videos = math.ceil(max(trained, validated) / sp_size)
    times = math.ceil(math.ceil(videos / block) / in_flight)
    seconds = times * (timeout * (retries + 1) + 0.5 * (2.0 ** min(retries, 60) - 1))  # waits double from half a second
    if seconds >= limit:
        yield (
            f"remote_reward_timeout {timeout:g} and remote_reward_retries {retries} let a rank wait {seconds:g} s for "
            f"a server ({retries + 1} attempts and the waits between them, {times} times, as at most {in_flight} "
            f"requests of {block} of its {videos} videos are in flight), but the others wait for it only "
            f"collective_timeout {limit} s: lower the first ones, or set collective_timeout above {seconds:g}"
        )


def _asks_server(reward: RewardConfig) -> bool:
    """Whether a server scores, as far as a `reward_config` that is not yet checked can be understood."""
    models, url = (reward.reward_config or {}).get("models"), reward.remote_reward_url
    if not isinstance(models, Mapping):
        return url is not None
    return any(entry.get("url", url) is not None for entry in models.values() if isinstance(entry, Mapping))


def _csv_problems(name: str, paths: Sequence[str], advice: str) -> Iterator[str]:
    """A CSV knob without files, or with files that are not there."""
    if not paths:
        yield f"{name} is empty: {advice}"
    for path in paths:
        if not Path(path).is_file():
            yield f"{name}: there is no file {path!r}"


def _file_problems(cfg: Config) -> Iterator[str]:
    """Inputs that are missing on disk. The model's own files are checked by its loader."""
    yield from _csv_problems("train_video_csv", cfg.data.train_video_csv, "give one or more CSVs with a prompt column")
    if cfg.validation.is_on:
        advice = "give one or more CSVs, or set validation_interval to 0 (and validate_at_step0 to false)"
        yield from _csv_problems("valid_video_csv", cfg.data.valid_video_csv, advice)
    checkpoint = cfg.run.resume_from_checkpoint
    if checkpoint not in (None, "latest") and not Path(checkpoint).exists():
        yield f"resume_from_checkpoint: there is no checkpoint {checkpoint!r}; give its path, or `latest`"


def _lora_problems(cfg: Config) -> Iterator[str]:
    """Adapter settings that contradict each other or the method."""
    model, path = cfg.model, cfg.model.pretrained_lora_path
    if model.use_lora and cfg.parallel.sp_size > 1 and "proj_out" in model.lora_target_modules:
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


def _precision_problems(cfg: Config) -> Iterator[str]:
    """Weights that the matrix products cannot be computed with."""
    if cfg.model.dtype == "fp32" and cfg.model.master_weight_type == "bf16":
        yield "dtype fp32 computes with fp32 weights, but master_weight_type is bf16: set both to one of them"


def _run_problems(cfg: Config) -> Iterator[str]:
    """Names that are empty, not a folder name, or not a setting."""
    for setting in cfg.run.resume_may_change:
        if setting not in KNOBS:
            yield f"resume_may_change: {setting!r} is not a setting; the nearest is {nearest(setting, KNOBS)!r}"
    name = cfg.run.run_name
    if name is not None and not re.fullmatch(r"[^/\\\0]+", name):
        yield f"run_name must be one folder name without slashes; received {name!r}"
    if cfg.run.output_dir == "":
        yield "output_dir is empty: give a folder, or leave it out for outputs/<run_name>-<time>"
