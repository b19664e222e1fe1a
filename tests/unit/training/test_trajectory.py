"""Blocks of a round and the conditioning of its samples."""

from collections.abc import Callable

import pytest
import torch

from hyvideo.training.trainer import Trainer
from hyvideo.training.trajectory import blocks
from tests.support.training import collect_round


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [(4, 2, [range(0, 2), range(2, 4)]), (5, 2, [range(0, 2), range(2, 4), range(4, 5)]), (3, 8, [range(0, 3)])],
)
def test_blocks_are_consecutive_and_cover_everything(count: int, size: int, expected: list[range]):
    assert blocks(count, size) == expected


def test_every_sample_has_the_conditioning_of_its_own_prompt(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer()
    trajectory = collect_round(trainer)
    assert len(trajectory) == 4
    assert len(trajectory.conditioning) == 2  # one row per unique prompt
    samples = torch.tensor([3, 0, 1])
    conditioning = trajectory.conditioning_of(samples)
    for row, sample in enumerate(samples.tolist()):
        expected = trainer.update.pipeline.encode([trajectory.prompts[sample]])
        assert torch.equal(conditioning.text[row][conditioning.text_mask[row]], expected.text[0])
        assert torch.equal(conditioning.glyph[row][conditioning.glyph_mask[row]], expected.glyph[0])


def test_a_round_is_scored_and_compared_within_its_groups(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer()
    trajectory = collect_round(trainer)
    scores = trainer.reward(trajectory.rollout.videos, trajectory.prompts)
    assert torch.equal(trajectory.scores.total, scores.total)
    assert trajectory.prompts[0] == trajectory.prompts[1] != trajectory.prompts[2] == trajectory.prompts[3]
    groups = trajectory.scores.total.view(2, 2)
    expected = (groups - groups.mean(1, keepdim=True)) / groups.std(1, correction=0, keepdim=True)
    torch.testing.assert_close(trajectory.advantages.view(2, 2), expected, rtol=1e-4, atol=1e-4)
    assert trajectory.advantages.abs().max() > 0.5
