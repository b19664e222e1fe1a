"""Sizes and counts that follow from a configuration."""

import pytest

from hyvideo.config.loading import load_config
from hyvideo.config.sizes import RolloutSizes, parse_size, rollout_sizes


def test_a_size_is_height_then_width():
    assert parse_size("352x624") == (352, 624)


@pytest.mark.parametrize(
    "text", ["", "352", "352X624", "352x", "x624", "0x16", "-16x16", "352x624x3", "352 x 624", "1e3x64", "٣x٣"]
)
def test_anything_else_is_refused_with_what_was_received(text):
    with pytest.raises(ValueError, match="HEIGHTxWIDTH") as error:
        parse_size(text)
    assert repr(text) in str(error.value)


def test_the_64_gpu_recipe_samples_64_videos_of_16_prompts():
    cfg = load_config(["--sp_size", "2", "--batch_size", "2", "--num_generations", "4"])
    assert rollout_sizes(cfg, world_size=64) == RolloutSizes(dp_degree=32, videos=64, prompts=16)
