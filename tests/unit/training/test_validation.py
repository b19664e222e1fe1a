"""What a validation leaves on disk."""

import json
from pathlib import Path

import torch

from hyvideo.distributed.mesh import Mesh
from hyvideo.models.reward_models.rewards import Scores
from hyvideo.training.collect import save_samples
from tests.support.rewards import grey_videos


def test_a_thousand_and_more_videos_are_listed_in_the_order_of_their_numbers(tmp_path: Path):
    count = 1002
    videos, scores = grey_videos(0, frames=1).expand(count, -1, -1, -1, -1), Scores({}, torch.arange(count) / 1.0, {})
    save_samples(tmp_path, videos, ["a"] * count, scores, fps=8, numbers=range(count), mesh=Mesh(), shown=())
    rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == list(range(count))
