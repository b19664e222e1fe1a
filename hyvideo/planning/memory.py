"""Peak memory of a GPU by phase: the transformer's part by simulation, and everything else."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.config.schema import Config
from hyvideo.distributed.layout import guidance_ranks, layout_of, videos_together
from hyvideo.models.flops import video_tokens
from hyvideo.planning.networks import Networks, make_vae
from hyvideo.planning.peak_memory import PeakMemory
from hyvideo.planning.simulation import Peaks, SimulatedCase, simulate
from hyvideo.planning.workload import latent_shape, validation_shape, validation_videos

DEPTHS = (4, 5)
"""Transformer blocks of the two simulations from which a deeper one is extrapolated. With fewer than four, no block has
on both sides all those whose weights are gathered and gradients reduced during its own pass."""

REWARD_ACTIVATIONS = 100 * 2**20
"""Bytes for each video scored together: three tensors of VideoAlign's widest layer (8,960) over 1,800 tokens, bf16."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, the most in each phase.

    Attributes:
        weights: shard of the transformer's weights.
        optimizer: shard of the optimizer's states.
        anchor: shard of the anchor.
        frozen: encoders and VAE, those that stay on the GPU.
        reward_networks: those on the GPU outside the reward phase as well.
        trajectory: a round's latents and means.
        rollout: sampling and decoding, all of the above included.
        reward: scoring, likewise.
        anchor_pass: the anchor's pass, likewise.
        update: the update, likewise.
        validation: sampling and decoding its videos, likewise; 0 without validation.
        ema: shard of the average of the trained weights.
    """

    weights: int
    optimizer: int
    anchor: int
    frozen: int
    reward_networks: int
    trajectory: int
    rollout: int
    reward: int
    anchor_pass: int
    update: int
    validation: int = 0
    ema: int = 0

    @property
    def peak(self) -> int:
        """The most of all phases."""
        return max(self.rollout, self.reward, self.anchor_pass, self.update, self.validation)


PeaksOf = Callable[[Config, SimulatedCase, int], Peaks]
"""Estimates peak memory: (config, case, world_size) -> Peaks."""


def predict_memory(
    config: Config, networks: Networks, *, world_size: int, num_text: int, peaks_of: PeaksOf | None = None
) -> Memory:
    """Predict the memory of rank 0, with prompts of `num_text` tokens.

    `peaks_of` estimates the transformer's peaks; None extrapolates from simulations of two depths.
    """
    shape, rows = latent_shape(config, networks), 1 + config.rollout.is_guided
    grpo, rollout = config.grpo, config.rollout
    layout = layout_of(config, world_size)
    videos, micro_batch = layout.num_own_videos, videos_together(config)
    pairs = min(grpo.mini_batch_size_per_update, videos * rollout.grpo_sampling_steps)
    together = validation_videos(config, world_size)[1]
    validated = (validation_shape(config, networks), rows * together) if together else None
    case = SimulatedCase(networks.transformer, shape, num_text, rows * micro_batch, rows * pairs, validated)
    peaks = (peaks_of or extrapolated_peaks)(config, case, world_size)

    algorithm = algorithm_class(grpo.algorithm)
    evaluations, num_copies = algorithm.evaluations(config), algorithm.num_copies(config)
    kept = 1 + evaluations.anchor  # float32 latents, and what other weights say of the trained pairs
    if algorithm.needs == "transitions":  # all latents, and the policy's means and the anchor's
        means = 2 if evaluations.anchor else 1
        kept = (1 + means) * rollout.grpo_sampling_steps + 1
    stored = 4 * torch.Size(shape).numel() * kept
    anchor = 0 if "weights" in config.parallel.offload else peaks.trained * num_copies
    ema = peaks.trained if config.optimizer.ema_decay and "ema" not in config.parallel.offload else 0
    ema = 0 if "weights" in config.parallel.offload else ema
    reward = networks.reward_bytes
    resting_reward = 0 if "reward" in config.parallel.offload else reward
    visitors = networks.encoder_bytes if "encoders" in config.parallel.offload else 0
    frozen = networks.encoder_bytes + networks.vae_bytes - visitors
    beside = frozen + ema + videos * stored
    around = beside + resting_reward
    # Gradients of whole weights are averaged over ranks in one flat copy.
    averaging = 2 * peaks.trained if world_size > 1 and not config.parallel.enable_fsdp else 0
    resting_anchor = 0 if "anchor" in config.parallel.offload else anchor
    resting = peaks.weights + peaks.states
    after_passes = resting + peaks.gathered
    visited = visitors + (after_passes if validated else resting)  # a round may begin after a validation
    decoding = after_passes + decoding_memory(networks.vae, shape)
    validating = 0
    if validated:
        validating = max(peaks.validation, after_passes + decoding_memory(networks.vae, validated[0]), visited)
    scored = min(config.reward.reward_batch_size, layout.most_to_score(videos))
    scoring = REWARD_ACTIVATIONS * scored if reward else 0
    scored_beside = reward + scoring if config.reward.reward_async else resting_reward
    return Memory(
        weights=peaks.weights,
        optimizer=peaks.states,
        anchor=anchor,
        ema=ema,
        frozen=frozen,
        reward_networks=resting_reward,
        trajectory=videos * stored,
        rollout=beside + scored_beside + resting_anchor + max(peaks.rollout + micro_batch * stored, decoding, visited),
        reward=beside + anchor + reward + after_passes + scoring,
        anchor_pass=around + anchor + peaks.anchor if evaluations.anchor else 0,
        update=around + resting_anchor + max(peaks.backward, resting + averaging, peaks.optimizer),
        validation=around + resting_anchor + validating if validated else 0,
    )


def extrapolated_peaks(config: Config, case: SimulatedCase, world_size: int) -> Peaks:
    """Simulate two depths and extrapolate, as every block adds the same; a shallow transformer is simulated whole."""
    depth = case.transformer["num_layers"]
    if depth <= max(DEPTHS):
        return simulate(config, case, world_size)
    few, more = (simulate(config, case.with_depth(number), world_size) for number in DEPTHS)
    return _on_line(few, more, {field.name: (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0]) for field in fields(Peaks)})


class FittedPeaks:
    """Interpolates the peaks of any video and micro-batch size: activations grow linearly with a pass's tokens.

    Two sizes are simulated, once for each combination of model, parallel and optimizer settings.
    """

    def __init__(self) -> None:
        self._ends: dict[str, tuple[Peaks, Peaks]] = {}

    def __call__(self, config: Config, case: SimulatedCase, world_size: int) -> Peaks:
        """Return the peaks of a case, on the line through the two simulated ones."""
        shapes = [(case.latent_shape[0], frames, 30, 54) for frames in (5, 21)]
        least = guidance_ranks(config.parallel.sp_size, guided=config.rollout.is_guided)  # one row on each rank
        ends = [SimulatedCase(case.transformer, shape, case.num_text, least, least, (shape, least)) for shape in shapes]
        key = repr((config.model, config.parallel, config.optimizer, least, world_size))
        if key not in self._ends:
            self._ends[key] = tuple(extrapolated_peaks(config, end, world_size) for end in ends)
        low, high = (_tokens(end, end.latent_shape, least) for end in ends)
        rows = {"rollout": case.rollout_rows, "anchor": case.update_rows, "backward": case.update_rows}
        tokens = {name: _tokens(case, case.latent_shape, count) for name, count in rows.items()}
        if case.validation:
            tokens["validation"] = _tokens(case, *case.validation)
        peaks = _on_line(*self._ends[key], {name: (count - low) / (high - low) for name, count in tokens.items()})
        return peaks if case.validation else replace(peaks, validation=0)


def _tokens(case: SimulatedCase, latent_shape: tuple[int, ...], rows: int) -> int:
    return rows * (video_tokens(case.transformer, latent_shape) + case.num_text)


def _on_line(first: Peaks, second: Peaks, places: Mapping[str, float]) -> Peaks:
    """Return each peak at its place on the line from `first` (0) to `second` (1); without a place, that of `second`."""
    values = {}
    for field in fields(Peaks):
        low, high = getattr(first, field.name), getattr(second, field.name)
        values[field.name] = round(low + (high - low) * places.get(field.name, 1))
    return Peaks(**values)


def decoding_memory(vae: Mapping[str, Any], shape: tuple[int, int, int, int]) -> int:
    """Return the bytes that decoding one video's latents `shape` takes besides the VAE's weights, by a simulation."""
    return _decoding_memory(json.dumps(dict(vae), sort_keys=True), tuple(shape))


@cache
def _decoding_memory(vae: str, shape: tuple[int, int, int, int]) -> int:
    """Simulate once for each VAE and shape: a search asks for the same ones again and again, seconds each."""
    with torch.device("meta"), torch.no_grad():
        network = make_vae(json.loads(vae))
        with PeakMemory() as memory:
            network.decode(torch.empty(1, *shape, dtype=torch.float16))
    return memory.peak
