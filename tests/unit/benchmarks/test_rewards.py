"""The benchmark of the rewards prints what it was asked for. The large networks take minutes."""

import re

import pytest

from benchmarks.rewards import main


def test_the_rewards_that_are_named_are_measured(capsys: pytest.CaptureFixture):
    assert main(["--only", "moving_shapes", "text_rendering"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"GiB, [\d.e+]+$", "GiB, N", line) for line in lines] == [
        "text_rendering, PP-OCRv6: 0.0 GiB, N",
        "moving_shapes, 17 frames of 64x64: 0.0 GiB, N",
    ]
