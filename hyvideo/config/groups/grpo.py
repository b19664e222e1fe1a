"""What an update learns from a scored round (paper arXiv 2603.21872)."""

from dataclasses import dataclass
from typing import Any

from hyvideo.config.setting import setting


@dataclass
class GrpoConfig:
    """Policy update: group-relative advantages and the clipped loss over stored denoising steps."""

    algorithm: str = "grpo"
    """Training algorithm: grpo, or `module:Class` for a subclass of Algorithm of your own that Python can import."""

    algorithm_options: dict[str, Any] | None = None
    """Options of an algorithm of your own, which reads them from the configuration. As a flag: JSON."""

    batch_size: int = setting(2, within="[1, 65536]")
    """Videos per data-parallel rank in one rollout. It must divide num_generations or be a multiple of it."""

    num_generations: int = setting(4, within="[2, 65536]")
    """Group size: videos of one prompt that are compared with each other."""

    clip_range: float = setting(1e-4, within="(0, inf)")
    """Clip of the policy ratio around 1. It is small because log-probabilities are means over all latent values."""

    adv_clip_max: float = setting(5.0, within="(0, inf)", unit="standard deviations")
    """Largest magnitude of an advantage."""

    timestep_fraction: float = setting(1.0, within="(0, 1]")
    """Share of the noisy denoising steps that are trained. Their number is rounded down."""

    timestep_stride: bool = False
    """Spread the trained steps evenly over the denoising, the same ones for all videos, instead of at random."""

    enable_timestep_permutation: bool = True
    """Train each video's steps in random order. Otherwise a timestep_fraction without timestep_stride keeps the
    noisiest steps."""

    use_grad_balancing: bool = True
    """Temporal gradient equalizer (paper Eq. 8-9): all steps contribute gradients of the same scale."""

    updates_per_rollout: int = setting(1, within="[1, inf)")
    """Updates that share the samples and steps of one round. Clipping and the velocity KL act from the second on,
    because the ratio is 1 in the first."""

    mini_batch_size_per_update: int = setting(1, within="[1, inf)", frees=("anchor", "update"))
    """(video, step) pairs that one rank trains in one pass. More are faster and take more memory."""

    gradient_accumulation_steps: int = setting(1, within="[1, 65536]")
    """Rollouts of batch_size videos per rank that one round collects. The paper uses 4."""
