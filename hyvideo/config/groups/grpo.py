"""What an update learns from a scored round (paper arXiv 2603.21872)."""

from dataclasses import dataclass
from typing import Any, Literal

from hyvideo.config.setting import setting


@dataclass
class GrpoConfig:
    """Policy update: group-relative advantages and the clipped loss over stored denoising steps."""

    algorithm: str = "grpo"
    """grpo, or `module:Class` for a subclass of Algorithm of your own."""

    algorithm_options: dict[str, Any] | None = None
    """Options that an algorithm of your own reads, as JSON."""

    batch_size: int = setting(2, within="[1, 65536]")
    """Videos per data-parallel rank and rollout. This or num_generations must divide the other."""

    num_generations: int = setting(4, within="[2, 65536]")
    """Videos of one prompt, which are compared with each other."""

    clip_range: float = setting(1e-4, within="(0, inf)")
    """Clip of the policy ratio around 1. It is small because log-probabilities are means over latent values."""

    replay_mismatch: Literal["warn", "stop"] = setting("warn", decides=False)
    """What happens when a replay without any update differs from its rollout by more than clip_range."""

    adv_clip_max: float = setting(5.0, within="(0, inf)", unit="standard deviations")
    """Largest magnitude of an advantage."""

    timestep_fraction: float = setting(1.0, within="(0, 1]")
    """Share of the noisy steps that are trained, rounded down."""

    timestep_stride: bool = False
    """Train evenly spaced steps, the same for all videos, instead of random ones."""

    enable_timestep_permutation: bool = True
    """Train steps in random order. Otherwise a timestep_fraction without timestep_stride keeps the noisiest."""

    use_grad_balancing: bool = True
    """Temporal gradient equalizer (paper Eq. 8-9): all steps' gradients get the same scale."""

    cps_equalizer: Literal["own_gradient", "published"] = setting("own_gradient", read_when="sde_type = cps")
    """Gradient by which the equalizer scales cps: that of its log-probability, or the reference's |d mean / d v| / std,
    which widens the spread."""

    updates_per_rollout: int = setting(1, within="[1, inf)")
    """Updates of one round. Clipping and the velocity KL act only from the second on."""

    mini_batch_size_per_update: int = setting(1, within="[1, inf)", frees=("anchor", "update"))
    """(video, step) pairs that one rank trains together. More are faster and take more memory."""

    gradient_accumulation_steps: int = setting(1, within="[1, 65536]")
    """Rollouts per rank in one round. The paper uses 4."""
