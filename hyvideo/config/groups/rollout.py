"""How training videos are sampled, and where noise is added to explore (paper arXiv 2603.21872)."""

from dataclasses import dataclass
from typing import Literal

from hyvideo.config.setting import EVERY_PHASE, setting


@dataclass
class RolloutConfig:
    """Exploration: how training videos are sampled and how much noise each denoising step adds."""

    sde_type: str = setting("sage_grpo", read_when="algorithm != nft")
    """Sampler. sage_grpo integrates the variance exactly (paper Eq. 5-7), flow_grpo to first order. dance_grpo has
    constant diffusion. cps preserves the coefficients. module:function is one of your own."""

    eta: float = setting(0.5, within="(0, 100]", read_when="algorithm != nft")
    """Strength of the noise. cps takes at most 1."""

    sage_clamp: float = setting(3e-3, within="(0, 1)", read_when="sde_type = sage_grpo")
    """sage_grpo starts at noise level 1 - sage_clamp, where its noise is finite. A smaller clamp adds more noise."""

    cfg_scale: float = setting(6.0, within="[1, inf)")
    """Classifier-free guidance in training and validation. 1 switches it off and halves the work. Distilled weights
    need 1."""

    negative_prompt: str = ""
    """Text that guidance steers away from."""

    grpo_sampling_steps: int = setting(20, within="[1, 10000]")
    """Denoising steps of a rollout."""

    sample_n_frames: int = setting(81, within="[1, inf)", frees=EVERY_PHASE)
    """Frames of a rollout video, 4n + 1."""

    rollout_size: str = "352x624"
    """HEIGHTxWIDTH of rollout videos in pixels."""

    infer_flow_shift_video: float = setting(5.0, within="(0, inf)")
    """Timestep shift of the rollout. A larger shift spends more steps at high noise."""

    video_fps: int = setting(24, within="[1, 1000]", unit="frames per second")
    """Frame rate of written videos, which rewards on video files see."""

    use_same_noise: bool = False
    """Start all videos of a prompt from the same noise."""

    published: list[Literal["prompt_noise", "cps_equalizer", "crf_25"]] = setting([])
    """Behaviours of the release instead of ours. prompt_noise: a prompt has the same first noises in every round.
    cps_equalizer: cps is scaled by |d mean / d v| / std instead of its own gradient, which widens the spread. crf_25:
    the mp4 files that rewards read are compressed by x264's CRF 25 instead of 16."""

    rollout_micro_batch_size: int = setting(1, within="[0, inf)", frees=("rollout", "validation"))
    """Videos that one rank denoises together; 0 is all. More are faster and take more memory."""

    sde_window: Literal["all", "first", "sliding", "per_group"] = setting("all", read_when="algorithm != nft")
    """Steps that draw noise and can be trained: all (the paper), the first sde_window_size, a window that moves from
    first to last (MixGRPO, arXiv 2507.21802), or one drawn for each prompt and round (Flash-GRPO, arXiv 2605.15980,
    with size 1)."""

    sde_window_size: int = setting(4, within="[1, inf)", read_when="sde_window != all")
    """Steps in the window. The work of update and anchor grows with it."""

    sde_window_interval: int = setting(25, within="[1, inf)", unit="rounds", read_when="sde_window = sliding")
    """Time after which a sliding window moves by one step."""

    base_interval: int = setting(0, within="[0, inf)", unit="updates", decides=False)
    """Time between rounds that the base model samples too, from the same prompts and noise. `reward/over_base` is what
    the policy's videos score more: a training curve without the luck of the prompts. A copy of the trained weights
    rests in host memory, unless they are a fresh adapter. 0 switches it off."""

    @property
    def is_guided(self) -> bool:
        """Whether every evaluation has a prompted and a negative row."""
        return self.cfg_scale != 1.0
