"""Which model scores the videos, and where."""

from dataclasses import dataclass
from typing import Any, Literal

from hyvideo.config.setting import setting


@dataclass
class RewardConfig:
    """Reward: which model scores the videos and how its metrics are weighted."""

    reward_model: str = setting("videoalign_local", read_when="reward_config = none")
    """Reward: videoalign_local, clip_score, pick_score, clip_iqa, text_rendering, vlm_checks, moving_shapes (for the
    tiny model), your own, or one of the server."""

    reward_weights: dict[str, float] = setting({"VQ": 0.5, "MQ": 0.5, "TA": 1.0}, read_when="reward_config = none")
    """Weight of each metric: visual quality VQ, motion quality MQ, text alignment TA. The default is the paper's
    setting B, equal weights are setting A."""

    reward_config: dict[str, Any] | None = None
    """Several rewards, instead of reward_model and reward_weights: {"models": {NAME: {"weight": 1.0, "sub_reward":
    {METRIC: WEIGHT}, "options": {...}, "url": ...}}}."""

    reward_aggregation: Literal["sum", "normalize_then_sum", "gdpo"] = "sum"
    """sum adds the weighted metrics (paper). normalize_then_sum first brings each to mean 0 and spread 1 within a
    prompt's videos. gdpo (arXiv 2601.05242) does too, but then divides by the spread of the round, not of each prompt.
    """

    reward_guard: dict[str, Any] | None = None
    """Judge that is not trained on, in the form of reward_config. It scores the validation videos. The run acts when
    the trained reward rises while the judge falls."""

    reward_guard_action: Literal["warn", "stop", "rollback"] = setting("warn", read_when="reward_guard != none")
    """stop ends the run and names the best checkpoint by the judge. rollback goes on from it at 0.3 of the rate,
    and stops the next time."""

    reward_checkpoint_path: str | None = None
    """Weights of reward_model. None looks for VideoReward below pretrained_model_root."""

    reward_io: Literal["file", "memory"] = "file"
    """Rewards on video files read an mp4, as the published scorer does, or frames in memory."""

    reward_batch_size: int = setting(8, within="[1, inf)", frees=("reward", "validation"))
    """Videos scored in one pass, or sent in one request."""

    reward_async: bool = setting(False, decides=False)
    """Score videos while the next ones are sampled. This is faster where a server or another device scores."""

    reward_max_failed: float = setting(0.5, within="[0, 1]", decides=False)
    """Share of a round's videos that may lack a score. Above it the run stops."""

    remote_reward_url: str | None = setting(None, decides=False)
    """http(s) address of a reward server. Its token is read from the variable REWARD_TOKEN."""

    remote_reward_timeout: float = setting(300.0, within="(0, 1e9]", unit="seconds", decides=False)
    """Longest wait for one request. On several ranks all attempts must fit into collective_timeout."""
