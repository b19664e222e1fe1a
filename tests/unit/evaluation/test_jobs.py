"""What the videos of a CSV are called."""

from pathlib import Path

import pytest

from hyvideo.data.prompts import Prompt
from hyvideo.evaluation.jobs import jobs_of_csv


def names(texts: list[str], seeds: list[int], names: str = "vbench", own: int | None = None) -> list[str]:
    prompts = [Prompt(text, index, own, None) for index, text in enumerate(texts)]
    return [job.path.name for job in jobs_of_csv(Path("videos"), prompts, seeds, names)]


def test_vbench_finds_every_video_under_its_prompt_and_number():
    long = "A very " + "long " * 50 + "road."
    expected = ["A cat.-0.mp4", "A cat.-1.mp4", f"{long[:180]}-0.mp4", f"{long[:180]}-1.mp4"]
    assert names(["A cat.", long], [7, 3]) == expected
    assert names(["A cat."], [7, 3], own=5) == ["A cat.-0.mp4"]
    assert names(["A cat."], [7, 3], "row") == ["0000_seed7.mp4", "0000_seed3.mp4"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a/b"], "'a/b' cannot be the name of a file"),
        (["木" * 180], "cannot be the name of a file"),
        (["same", "same"], "two videos would be 'same-0.mp4'"),
        (["x" * 180 + "a", "x" * 180 + "b"], "two videos would be"),
    ],
)
def test_names_that_vbench_could_not_find_are_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        names(texts, [0])
