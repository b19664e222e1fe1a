"""Rounds are compared with those of other weights on the same prompts and noise, and the videos of a group."""

import pytest
import torch

from hyvideo.models.parallelize import trainable_parameters
from hyvideo.observability.metrics import read_metrics
from hyvideo.training.collect import collect, gain_over, group_diversity, thumbnails
from tests.support.equal_runs import rows_of


def test_a_round_is_compared_with_the_base_models_of_the_same_prompts_and_noise(trained):
    """At the first update the two are one; later ones differ, and comparing changes nothing else."""
    flags = {"max_steps": 5, "learning_rate": 1e-2}
    training, without = trained(**flags, base_interval=2), trained(**flags)
    rows = read_metrics(training.folder.path / "metrics.jsonl")
    assert [row["step"] for row in rows if "reward/over_base" in row] == [1, 3, 5]
    assert rows[0]["reward/over_base"] == 0.0
    assert rows[2]["reward/over_base"] != 0.0 != rows[4]["reward/over_base"]
    left = rows_of(training.folder.path)
    for row in left:
        row.pop("reward/over_base", None)
    assert left == rows_of(without.folder.path)


def test_a_gain_is_what_the_round_scores_more_than_the_same_noise_by_other_weights(make_training):
    training = make_training()
    parts = (training.policy, training.algorithm, training.reward, training.rounds.next())
    before = collect(*parts)
    assert gain_over(*parts, before) == 0.0
    with torch.no_grad():
        for weight in trainable_parameters(training.policy.transformer).values():
            weight.mul_(1.05)
    after = collect(*parts)
    expected = float((before.scores.total - after.scores.total).mean())
    assert gain_over(*parts, before) == expected != 0.0


def test_diversity_is_the_root_mean_square_distance_from_the_groups_mean():
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.25, 0.5], [0.25, 0.5]])
    assert group_diversity(points, 2).tolist() == pytest.approx([0.125**0.5, 0.0])


def test_thumbnails_keep_colours_and_places_and_forget_the_size():
    videos = torch.zeros(2, 9, 32, 48, 3, dtype=torch.uint8)
    videos[1, :, :, 24:, 0] = 255
    dark, half_red = thumbnails(videos)
    assert dark.shape == (4 * 3 * 16 * 16,) and dark.abs().max() == 0
    red = half_red.view(4, 3, 16, 16)
    assert red[:, 0, :, 8:].min() == 1 and red[:, 0, :, :8].max() == red[:, 1:].max() == 0
    # A shorter video has fewer frames.
    assert thumbnails(torch.zeros(1, 1, 16, 16, 3, dtype=torch.uint8)).shape == (1, 3 * 16 * 16)
