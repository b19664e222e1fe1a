"""VideoAlign (VideoReward): a Qwen2-VL that rates visual quality, motion quality and text alignment of a video."""

from hyvideo.models.reward_models.videoalign.scorer import VideoAlignReward, VideoAlignScorer

__all__ = ["VideoAlignReward", "VideoAlignScorer"]
