"""VideoAlign (VideoReward): a Qwen2-VL that rates visual quality, motion quality and text alignment of a video."""

from hyvideo.models.reward_models.videoalign.reward import VideoAlignReward
from hyvideo.models.reward_models.videoalign.scorer import VideoAlignScorer

__all__ = ["VideoAlignReward", "VideoAlignScorer"]
