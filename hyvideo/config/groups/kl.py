"""The KL penalty that holds the policy near its anchor (paper Eq. 11-15, A.6)."""

from dataclasses import dataclass
from typing import Literal

from hyvideo.config.setting import setting


@dataclass
class KLConfig:
    """Trust region: the KL penalty that holds the policy near its anchor (paper Eq. 11-15, A.6)."""

    kl_weight: float = setting(1e-5, within="[0, inf)", read_when="algorithm != nft")
    """Largest value of lambda, the penalty's coefficient. 0 switches off this group."""

    use_moving_KL: bool = setting(True, read_when="algorithm != nft")
    """Copy the policy to the anchor every update_ref_model_step. Otherwise the anchor stays the initial model."""

    use_dual_kl: bool = setting(True, read_when="algorithm != nft")
    """Add the velocity term to the position term."""

    dual_kl_moving_weight: float = setting(1.0, within="[0, inf)", read_when="use_dual_kl = true")
    """Weight of the position term, the distance of denoising means to the anchor's."""

    dual_kl_step_weight: float = setting(0.1, within="[0, inf)", read_when="use_dual_kl = true")
    """Weight of the velocity term, the log-probability at rollout minus the current one."""

    update_ref_model_step: int = setting(10, within="[0, inf)", unit="updates", read_when="use_moving_KL = true")
    """Time between two refreshes of the anchor. 0 never refreshes it."""

    anchor_fraction: float = setting(1.0, within="(0, 1]", read_when="algorithm != nft")
    """Share of the trained steps that is compared with the anchor. Each weighs more in return, so that the position
    term keeps its mean but becomes noisier. 0.5 halves the anchor's pass."""

    kl_schedule: Literal["fixed", "two_stage", "milder"] = setting("two_stage", read_when="algorithm != nft")
    """fixed keeps lambda at kl_weight. two_stage warms it up, then steers the KL towards kl_target. milder does so
    below a tenth of kl_weight."""

    kl_warmup_updates: int = setting(100, within="[0, inf)", unit="updates", read_when="kl_schedule != fixed")
    """Time in which lambda rises from kl_coef to its largest value."""

    kl_coef: float | None = setting(None, within="[0, inf)", read_when="kl_schedule != fixed")
    """Lambda at the start of the warm-up. None is kl_min_coef."""

    kl_min_coef: float = setting(1e-7, within="[0, inf)", read_when="kl_schedule != fixed")
    """Smallest value of lambda."""

    kl_target: float | None = setting(None, within="(0, inf)", read_when="kl_schedule != fixed")
    """Desired KL. None is kl_weight. Lambda shrinks by 0.9 per update while the mean of the last 10 KLs is above 1.5
    times this, and grows by 1.1 below half of it."""

    @property
    def moves_anchor(self) -> bool:
        """Whether the anchor follows the policy."""
        return self.use_moving_KL and self.update_ref_model_step > 0
