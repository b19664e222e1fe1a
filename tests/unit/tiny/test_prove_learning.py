"""The base's videos are sampled once for a run of the learning proof, and none are kept that were cut off."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyvideo.models.reward_models.rewards import Scores
from hyvideo.training.validation import Sampled
from scripts.tiny import prove_learning


def test_a_run_that_is_killed_while_it_saves_the_bases_videos_samples_them_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    scores = Scores({"VQ": torch.ones(1)}, torch.ones(1), {"VQ": 1.0})
    sampled = Sampled(range(1), torch.zeros(1, 1, 2, 2, 3, dtype=torch.uint8), scores)
    validation = SimpleNamespace(sample=lambda prompts: sampled)
    training = SimpleNamespace(state=SimpleNamespace(step=0), validation=validation)

    def killed(content: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", killed)
        prove_learning._base(training, [None], tmp_path)
    assert torch.equal(prove_learning._base(training, [None], tmp_path).videos, sampled.videos)
