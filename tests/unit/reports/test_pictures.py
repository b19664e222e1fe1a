"""Pictures of a run: pairs of videos under their captions, and the reward curve with what held-out videos gained."""

import numpy as np
import pytest
import torch
from PIL import Image

from hyvideo.data.videos import read_video
from hyvideo.evaluation.paired import Gain
from hyvideo.observability.metrics import MetricsLog
from scripts.reports.pictures import plot_reward_curve, side_by_side
from tests.support.rewards import moving_square


def test_each_pair_is_shown_left_and_right_small_ones_enlarged_in_video_and_sheet(tmp_path):
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
    videos = moving_square(2, 200, 300)[None]
    side_by_side(videos, videos, ["one pair"], tmp_path / "pair.mp4")
    height, width = read_video(tmp_path / "pair.mp4").shape[1:3]
    assert 200 < height < 300 and 600 < width < 660


def logged_run(run_dir, num_steps=30):
    log = MetricsLog(run_dir)
    for step in range(1, num_steps + 1):
        components = {f"reward/{name}": 0.02 * step for name in ("VQ", "MQ", "TA")}
        mean = np.nan if step == 4 else 0.02 * step
        log.log(step, components | {"reward/mean": mean, "reward/std": 0.5})
    log.close()
    return log.path


def test_a_run_becomes_a_picture_with_ink_in_every_panel(tmp_path):
    plot_reward_curve(logged_run(tmp_path), tmp_path / "plots" / "curve.png", held_out={})
    picture = np.array(Image.open(tmp_path / "plots" / "curve.png").convert("RGB")).astype(int)
    assert picture.shape == (825, 1650, 3)
    blue = picture[..., 2] - picture[..., 0] > 100
    large, small = blue[:, :1100], blue[:, 1100:]
    assert large.any() and all(part.any() for part in np.array_split(small, 3))
    assert list((tmp_path / "plots").iterdir()) == [tmp_path / "plots" / "curve.png"]
    plot_reward_curve(logged_run(tmp_path / "short", num_steps=1), tmp_path / "short.png", held_out={})
    assert (tmp_path / "short.png").exists(), "a single update can be drawn"
    log = MetricsLog(tmp_path / "none")
    log.log(1, {"lr": 1.0})
    log.close()
    with pytest.raises(ValueError, match="no 'reward/mean' in its 1 rows"):
        plot_reward_curve(log.path, tmp_path / "curve.png", held_out={})


def test_a_held_out_gain_is_drawn_over_the_curve_of_its_name(tmp_path):
    gain = Gain(before=0.0, after=0.5, mean=0.5, low=0.3, high=0.7, in_base_std=1.0, num_pairs=8, num_left_out=0)
    for name, gains in {"without": {}, "with": {"TA": gain, "a metric without a panel": gain}}.items():
        plot_reward_curve(logged_run(tmp_path / name), tmp_path / f"{name}.png", held_out=gains)
    without, drawn = (np.array(Image.open(tmp_path / f"{name}.png").convert("L")) for name in ("without", "with"))
    black = [[part[:, 1150:] < 60 for part in np.array_split(picture, 3)] for picture in (without, drawn)]
    more = [int(after.sum()) - int(before.sum()) for before, after in zip(*black, strict=True)]
    assert more[2] > 500 and max(abs(more[0]), abs(more[1])) < 100  # TA is the lowest of the three


def test_the_curve_over_the_base_replaces_that_of_the_training_reward(tmp_path):
    """Beside hundreds the training reward of a single round shows how far the axes reach."""
    gain = Gain(before=300.0, after=301.0, mean=1.0, low=0.5, high=1.5, in_base_std=1.0, num_pairs=8, num_left_out=0)
    log = MetricsLog(tmp_path)
    for step in range(1, 13):
        over = {"reward/over_base": 0.1 * step} if step % 4 == 1 else {}
        log.log(step, over | {"round": (step - 1) // 2, "reward/mean": 300.0 + step, "reward/std": 50.0})
    log.close()
    plot_reward_curve(log.path, tmp_path / "curve.png", held_out={"reward": gain})
    picture = np.array(Image.open(tmp_path / "curve.png").convert("RGB")).astype(int)[:, :1100]
    rows = np.nonzero((picture[..., 2] - picture[..., 0] > 100).any(1))[0]
    assert rows.max() - rows.min() > 300  # from 0 to 1, and not a line at the upper end
