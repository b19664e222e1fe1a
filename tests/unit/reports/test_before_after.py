"""Videos side by side show each pair as it is, under its caption."""

import numpy as np
import pytest
import torch
from PIL import Image

from hyvideo.data.videos import read_video
from scripts.reports.before_after import side_by_side
from tests.support.videos import moving_square


def test_side_by_side_shows_each_pair_left_and_right_enlarged_in_video_and_sheet(tmp_path):
    red = moving_square(5, colour=(220, 40, 40)).repeat(3, 1, 1, 1, 1)
    blue = moving_square(5, colour=(40, 40, 220)).repeat(3, 1, 1, 1, 1)
    captions = ["a square moves right", "a caption of many words " * 20, "“quotes” and 中文"]
    sheet_path = side_by_side(red, blue, captions, tmp_path / "pairs.mp4")
    video, sheet = read_video(tmp_path / "pairs.mp4"), torch.from_numpy(np.array(Image.open(sheet_path)))

    assert sheet_path == tmp_path / "pairs.png" and len(video) == 5
    for picture, num_squares in ((video[0], 1), (sheet, 5)):
        is_red = (picture[..., 0] > 180) & (picture[..., 2] < 90)
        is_blue = (picture[..., 2] > 180) & (picture[..., 0] < 90)
        area = num_squares * 3 * (12 * 3) ** 2  # squares of 12 pixels enlarged by 3, in three pairs
        assert is_red.sum().item() == pytest.approx(area, rel=0.05)
        assert is_blue.sum().item() == pytest.approx(area, rel=0.05)
    columns_of = [mask.any(0).nonzero() for mask in (is_red, is_blue)]
    assert columns_of[0].max() < columns_of[1].min()


def test_large_videos_keep_their_size_in_the_grid(tmp_path):
    videos = moving_square(2, 200, 300)[None]
    side_by_side(videos, videos, ["one pair"], tmp_path / "pair.mp4")
    height, width = read_video(tmp_path / "pair.mp4").shape[1:3]
    assert 200 < height < 300 and 600 < width < 660


def test_pairs_that_do_not_match_are_refused_with_their_shapes(tmp_path):
    videos = moving_square(2)[None]
    with pytest.raises(ValueError, match=r"received 2 captions, \[1, 2, 64, 64, 3\] and \[1, 2, 64, 64, 3\]"):
        side_by_side(videos, videos, ["a", "b"], tmp_path / "a.mp4")
    with pytest.raises(ValueError, match=r"\[1, 2, 64, 64, 3\] and \[1, 1, 64, 64, 3\]"):
        side_by_side(videos, videos[:, :1], ["a"], tmp_path / "a.mp4")
