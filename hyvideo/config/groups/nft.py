"""What DiffusionNFT learns from a scored round (arXiv 2509.16117)."""

from dataclasses import dataclass

from hyvideo.config.setting import setting

_NFT = "algorithm = nft"


@dataclass
class NftConfig:
    """DiffusionNFT (arXiv 2509.16117): flow matching on good and bad videos, compared with an older policy.

    It also reads adv_clip_max, the timestep_* settings, updates_per_rollout and mini_batch_size_per_update.
    """

    nft_beta: float = setting(1.0, within="(0, inf)", read_when=_NFT)
    """Distance between the policy and the implicit good and bad ones. A smaller value learns more from each step. The
    release has 0.1 to 1."""

    nft_adaptive_weighting: bool = setting(True, read_when=_NFT)
    """Compare predicted clean latents and divide by their mean error, instead of comparing velocities."""

    nft_old_ramp: float = setting(0.001, within="[0, 1]", unit="per update", read_when=_NFT)
    """After a round the old policy, which samples, becomes a mean of itself and the policy. Its own weight in it is
    this number times the updates made so far, at most nft_old_decay. 0 copies the policy. The release has 0.001,
    and for some rewards a faster ramp that begins later."""

    nft_old_decay: float = setting(0.5, within="[0, 1]", read_when=_NFT)
    """Largest share of itself that the old policy keeps. The release has 0.5, or 0.999."""

    nft_kl_weight: float = setting(0.0, within="[0, inf)", read_when=_NFT)
    """Weight of the squared distance to the base model's velocity. It costs one more pass, and without a fresh adapter
    one more copy of the weights. The release has 1e-4."""
