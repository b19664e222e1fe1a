"""What an update learns from a scored round (paper arXiv 2603.21872)."""

from dataclasses import dataclass
from typing import Any, Literal

from hyvideo.config.setting import setting


@dataclass
class GrpoConfig:
    """Policy update: group-relative advantages and the clipped loss over stored denoising steps."""

    algorithm: str = "grpo"
    """grpo, nft (DiffusionNFT, arXiv 2509.16117), or `module:Class` for a subclass of Algorithm of your own."""

    algorithm_options: dict[str, Any] | None = setting(None, read_when="algorithm != grpo")
    """Options of nft (`NFTOptions` in hyvideo/algorithms/nft.py) or of an algorithm of your own."""

    batch_size: int = setting(2, within="[1, 65536]")
    """Videos per data-parallel rank and rollout. This or num_generations must divide the other."""

    num_generations: int = setting(4, within="[2, 65536]")
    """Videos of one prompt, which are compared with each other."""

    clip_range: float = setting(1e-4, within="(0, inf)", read_when="algorithm != nft")
    """Clip of the policy ratio around 1. It is small because log-probabilities are means over latent values."""

    clip_range_high: float | None = setting(None, within="(0, inf)", read_when="algorithm != nft")
    """Clip of the policy ratio above 1, where it shall differ from that below (DAPO, arXiv 2503.14476)."""

    ratio_norm: bool = setting(False, read_when="algorithm != nft")
    """Normalize the ratio at each step (GRPO-Guard, arXiv 2510.22319), so that it lies around 1 and its clip acts alike
    at all steps. It shrinks by the step's noise and needs a smaller clip_range."""

    adv_clip_max: float = setting(5.0, within="(0, inf)", unit="standard deviations")
    """Largest magnitude of an advantage."""

    advantage_std: Literal["group", "global", "none"] = setting("group", read_when="reward_aggregation != gdpo")
    """What an advantage is divided by: the standard deviation of its group (paper), that of all rewards of the round
    (Flow-GRPO, DiffusionNFT), or nothing (Dr. GRPO, arXiv 2503.20783)."""

    timestep_fraction: float = setting(1.0, within="(0, 1]")
    """Share of the noisy steps that are trained, rounded down; with nft of all steps."""

    enable_timestep_permutation: bool = True
    """Train steps in random order. Otherwise a timestep_fraction keeps the noisiest."""

    use_grad_balancing: bool = setting(True, read_when="algorithm != nft")
    """Temporal gradient equalizer (paper Eq. 8-9): all steps' gradients get the same scale."""

    updates_per_rollout: int = setting(1, within="[1, inf)")
    """Updates of one round. Clipping and the velocity KL act only from the second on."""

    mini_batch_size_per_update: int = setting(1, within="[1, inf)", frees=("anchor", "update"))
    """(video, step) pairs that one rank trains together. More are faster and take more memory."""

    gradient_accumulation_steps: int = setting(1, within="[1, 65536]")
    """Rollouts per rank in one round. The paper uses 4."""
