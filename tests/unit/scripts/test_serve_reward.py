"""A reward server refuses a command line by which it would answer other than it was asked to."""

import pytest

from hyvideo.models.reward_models.registry import RewardContext
from scripts.serve_reward import build_app, parse_arguments, read_reward


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max_body_mb", "0"], "--max_body_mb must be at least 1; received 0"),
        (["--video_fps", "0"], "--video_fps must be a number above 0; received 0.0"),
        (["--video_fps", "nan"], "--video_fps must be a number above 0; received nan"),
        (["--port", "99999"], "--port must lie between 0 and 65535; received 99999"),
        (["--port", "-1"], "--port must lie between 0 and 65535; received -1"),
        (["--reward", 'clip_score={"checkpoint": "other"}'], "has each reward once; received clip_score, clip_score"),
    ],
)
def test_wrong_numbers_and_a_reward_named_twice_are_refused_before_a_reward_is_loaded(argv: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        build_app(parse_arguments(["--reward", "clip_score", *argv]), None)


@pytest.mark.parametrize("options", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000], ids=["lists", "mappings", "digits"])
def test_options_that_no_reader_of_json_can_take_are_refused(options: str):
    with pytest.raises(ValueError, match="--reward clip_score: expected its options as JSON") as caught:
        read_reward(f"clip_score={options}", RewardContext())
    assert len(str(caught.value)) < 1000
