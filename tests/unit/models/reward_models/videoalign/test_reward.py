"""VideoAlign as a reward of the configuration gives the scorer's numbers, through files and from memory."""

from pathlib import Path

import pytest
import torch

from hyvideo.config.schema import RewardConfig
from hyvideo.data.videos import read_video, write_video
from hyvideo.models.reward_models.rewards import get_reward_fn
from hyvideo.models.reward_models.videoalign import VideoAlignScorer
from tests.support.videoreward import VideoReward

PROMPTS = ["a red circle moves slowly to the left", "green cross"]
FPS = 6


@pytest.mark.parametrize("reward_io", ["file", "memory"])
def test_the_reward_is_the_scorers_of_the_videos_at_the_runs_frame_rate(
    whole: VideoReward, clips: list[Path], tmp_path: Path, reward_io: str
):
    video = read_video(clips[1])
    videos = torch.stack([video, video.flip(0)])
    config = RewardConfig(reward_checkpoint_path=str(whole.root), reward_io=reward_io)
    scores = get_reward_fn(config, video_fps=FPS)(videos, PROMPTS)
    paths = [tmp_path / "0.mp4", tmp_path / "1.mp4"]
    for path, each in zip(paths, videos, strict=True):
        write_video(path, each, FPS)
    scorer = VideoAlignScorer(whole.root)
    if reward_io == "file":
        expected = scorer.score(paths, PROMPTS)
    else:
        expected = scorer.score_frames(videos, FPS, PROMPTS)
    for metric in ("VQ", "MQ", "TA"):
        assert scores.metrics[metric].tolist() == pytest.approx(expected[metric], abs=2e-5), metric
    total = [0.5 * vq + 0.5 * mq + ta for vq, mq, ta in zip(*(expected[m] for m in ("VQ", "MQ", "TA")), strict=True)]
    assert scores.total.tolist() == pytest.approx(total, abs=1e-4)
