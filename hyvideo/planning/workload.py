"""What one rank computes and sends in one round: counted passes times the formulas of one pass."""

import math
from dataclasses import dataclass
from functools import partial

import torch

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.config.schema import Config
from hyvideo.config.sizes import parse_size
from hyvideo.distributed.layout import guidance_ranks, largest_share, layout_of, videos_together
from hyvideo.models.flops import PassFlops, transformer_flops, vae_decode_flops, video_tokens
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import decoded_together
from hyvideo.planning.networks import Networks, make_vae
from hyvideo.planning.traffic import ParameterCounts, Traffic, token_traffic, weight_traffic
from hyvideo.training.build import DTYPES


@dataclass(frozen=True)
class PhaseWork:
    """What one rank does in one phase of a round: its operations, and the bytes that it sends."""

    flops: int
    traffic: Traffic


@dataclass(frozen=True)
class Workload:
    """One rank's round.

    Attributes:
        videos: videos of this rank, shared with the others of its sequence-parallel group.
        updates: optimizer updates.
        rollout: sampling and decoding.
        anchor: the anchor's pass over the trained pairs.
        update: forward and backward passes, and the optimizer.
        validation: sampling and decoding of one validation, which is no part of a round; None: there is none.
    """

    videos: int
    updates: int
    rollout: PhaseWork
    anchor: PhaseWork
    update: PhaseWork
    validation: PhaseWork | None

    @property
    def phases(self) -> dict[str, PhaseWork]:
        """The phases of the round by name."""
        return {"rollout": self.rollout, "anchor": self.anchor, "update": self.update}

    @property
    def flops(self) -> int:
        """Operations of the round on this rank."""
        return sum(phase.flops for phase in self.phases.values())


def latent_shape(config: Config, networks: Networks) -> tuple[int, int, int, int]:
    """Return `(C, F', H', W')` of a rollout video's latents."""
    return _latents(networks, config.rollout.sample_n_frames, config.rollout.rollout_size)


def validation_shape(config: Config, networks: Networks) -> tuple[int, int, int, int]:
    """Return `(C, F', H', W')` of a validation video's latents."""
    return _latents(networks, config.validation.validate_video_length, config.validation.validation_fixed_size)


def _latents(networks: Networks, num_frames: int, size: str) -> tuple[int, int, int, int]:
    vae, (height, width) = networks.vae, parse_size(size)
    frames = (num_frames - 1) // vae["temporal_compression_ratio"] + 1
    spatial = vae["spatial_compression_ratio"]
    return vae["latent_channels"], frames, height // spatial, width // spatial


def validation_videos(config: Config, world_size: int) -> tuple[int, int]:
    """Return the videos that one rank samples per validation, and how many of them together; 0 without validation."""
    settings = config.validation
    if not settings.is_on:
        return 0, 0
    count = layout_of(config, world_size).most_to_sample(settings.validation_num_videos)
    return count, min(config.rollout.rollout_micro_batch_size or count, count)


def token_ranks(config: Config) -> int:
    """Return how many ranks share the tokens of a row."""
    sp_size = config.parallel.sp_size
    return sp_size // guidance_ranks(sp_size, guided=config.rollout.is_guided)


def workload(
    config: Config, networks: Networks, parameters: ParameterCounts, *, world_size: int, num_text: int
) -> Workload:
    """Count one rank's round, with prompts of `num_text` tokens."""
    grpo, parallel, rollout = config.grpo, config.parallel, config.rollout
    inference = _weight_traffic(config, parameters, world_size)
    sampling = partial(_sampling, config, networks, num_text, inference)
    videos = layout_of(config, world_size).num_own_videos
    evaluations = algorithm_class(grpo.algorithm).evaluations(config)
    pairs = videos * evaluations.update
    shape = latent_shape(config, networks)
    forward, sizes = _one_pass(config, networks, num_text, shape)
    recompute = parallel.activation_checkpointing
    training = forward.training(recompute=recompute, weight_gradients=not config.model.use_lora)
    tokens = token_traffic(networks.transformer, **sizes, training=False)
    trained_tokens = token_traffic(networks.transformer, **sizes, training=True, recompute=recompute != "none")
    batches = math.ceil(videos / videos_together(config))
    passes = math.ceil(pairs / grpo.mini_batch_size_per_update)
    anchor_pairs = videos * evaluations.anchor
    anchor_calls = math.ceil(anchor_pairs / grpo.mini_batch_size_per_update)
    if not parallel.reshard_after_forward:
        anchor_calls = min(1, anchor_calls)
    update_traffic = trained_tokens.times(pairs)
    update_traffic += _weight_traffic(config, parameters, world_size, training=True).times(passes)
    update_traffic += _optimizer_traffic(config, parameters, world_size).times(grpo.updates_per_rollout)
    own, together = validation_videos(config, world_size)
    validation = None
    if own:
        num_steps = config.validation.validation_num_inference_steps
        validation = sampling(validation_shape(config, networks), own, num_steps, math.ceil(own / together), own)
    decoded = videos  # by every rank that shares them, if each block of them is scored at once
    if not config.reward.reward_async:
        at_once = min(videos_together(config), decoded_together(shape))
        decoded = min(videos, at_once * largest_share(math.ceil(videos / at_once), parallel.sp_size))
    return Workload(
        videos,
        grpo.updates_per_rollout,
        sampling(shape, videos, rollout.grpo_sampling_steps, batches, decoded, evaluations.rollout),
        PhaseWork(
            anchor_pairs * sizes["rows"] * forward.total, tokens.times(anchor_pairs) + inference.times(anchor_calls)
        ),
        PhaseWork(pairs * sizes["rows"] * training, update_traffic),
        validation,
    )


def _one_pass(
    config: Config, networks: Networks, num_text: int, shape: tuple[int, int, int, int]
) -> tuple[PassFlops, dict[str, int]]:
    """Return the operations of a forward pass over one row of a video, and the sizes that its traffic depends on."""
    num_video, sp_size = video_tokens(networks.transformer, shape), token_ranks(config)
    guided = config.rollout.is_guided
    flops = transformer_flops(networks.transformer, num_video=num_video, num_text=num_text, sp_size=sp_size)
    return flops, {
        "num_video": num_video,
        "num_condition": num_text,
        "rows": (1 + guided) // guidance_ranks(config.parallel.sp_size, guided=guided),  # unless two ranks share them
        "sp_size": sp_size,
        "token_bytes": DTYPES[config.model.dtype].itemsize,
    }


def _sampling(
    config: Config,
    networks: Networks,
    num_text: int,
    weights: Traffic,
    shape: tuple[int, int, int, int],
    videos: int,
    num_steps: int,
    batches: int,
    decoded: int,
    per_video: float | None = None,
) -> PhaseWork:
    """Count what one rank does to sample `videos` videos with latents `shape`, in so many batches, and decode some.

    `weights` is what they cost in one pass; `per_video` is the number of evaluations of a video, if not that of steps.
    """
    forward, sizes = _one_pass(config, networks, num_text, shape)
    tokens = token_traffic(networks.transformer, **sizes, training=False)
    with torch.device("meta"):
        decoding = vae_decode_flops(make_vae(networks.vae), shape)
    calls = batches * num_steps if config.parallel.reshard_after_forward else 1
    steps = round(videos * (num_steps if per_video is None else per_video))
    flops = steps * sizes["rows"] * forward.total + decoded * decoding
    return PhaseWork(flops, tokens.times(steps) + weights.times(calls))


def _weight_traffic(config: Config, parameters: ParameterCounts, world_size: int, *, training: bool = False) -> Traffic:
    """Return what the weights cost in one pass."""
    if not config.parallel.enable_fsdp:
        return Traffic()
    return weight_traffic(
        parameters,
        num_shards=layout_of(config, world_size).num_shards,
        dp_replicate=config.parallel.dp_replicate,
        block_bytes=DTYPES[config.model.dtype].itemsize,
        around_bytes=DTYPES[config.model.master_weight_type].itemsize,
        training=training,
        resharded=config.parallel.reshard_after_forward,
    )


def _optimizer_traffic(config: Config, parameters: ParameterCounts, world_size: int) -> Traffic:
    """Return what an update costs besides its passes: whole matrices for Muon, or gradients that are not sharded."""
    if not config.parallel.enable_fsdp:
        return Traffic(copies=2 * 4 * parameters.trained * (world_size - 1) // world_size)
    shards = layout_of(config, world_size).num_shards
    matrices = parameters.trained_matrices if config.optimizer.use_muon else 0
    return Traffic(weights=2 * matrices * (shards - 1) // shards)
