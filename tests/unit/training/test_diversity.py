"""Diversity is 0 for equal videos, grows with their distance and is a group's own."""

import pytest
import torch

from hyvideo.training.collect import group_diversity, thumbnails


def test_it_is_the_root_mean_square_distance_from_the_groups_mean():
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.25, 0.5], [0.25, 0.5]])
    assert group_diversity(points, 2).tolist() == pytest.approx([0.125**0.5, 0.0])


def test_thumbnails_keep_colours_and_places_and_forget_the_size():
    videos = torch.zeros(2, 9, 32, 48, 3, dtype=torch.uint8)
    videos[1, :, :, 24:, 0] = 255
    dark, half_red = thumbnails(videos)
    assert dark.shape == (4 * 3 * 16 * 16,)
    assert dark.abs().max() == 0
    red = half_red.view(4, 3, 16, 16)
    assert red[:, 0, :, 8:].min() == 1
    assert red[:, 0, :, :8].max() == red[:, 1:].max() == 0
    # A shorter video has fewer frames.
    assert thumbnails(torch.zeros(1, 1, 16, 16, 3, dtype=torch.uint8)).shape == (1, 3 * 16 * 16)
