"""A reward server refuses a command line by which it would answer other than it was asked to."""

import pytest

from scripts.serve_reward import build_app, parse_arguments


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max_body_mb", "0"], "--max_body_mb must be at least 1; received 0"),
        (["--video_fps", "0"], "--video_fps must be a number above 0; received 0.0"),
        (["--video_fps", "nan"], "--video_fps must be a number above 0; received nan"),
        (["--reward", 'clip_score={"checkpoint": "other"}'], "has each reward once; received clip_score, clip_score"),
    ],
)
def test_wrong_numbers_and_a_reward_named_twice_are_refused_before_a_reward_is_loaded(argv: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        build_app(parse_arguments(["--reward", "clip_score", *argv]), None)
