"""The starter prompts are what their README says."""

from pathlib import Path

import pytest

from hyvideo.data.prompts import Prompt, read_prompts

FOLDER = Path(__file__).parents[3] / "assets" / "prompts"


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[Prompt]]:
    return {name: read_prompts([FOLDER / f"{name}.csv"]) for name in ("train", "valid")}


def test_there_are_enough_and_none_twice(prompts: dict[str, list[Prompt]]):
    texts = {name: [prompt.text for prompt in rows] for name, rows in prompts.items()}
    assert len(texts["train"]) == 410
    assert len(texts["valid"]) == 32
    everything = texts["train"] + texts["valid"]
    assert len(set(everything)) == len(everything)


def test_long_and_short_ones_and_text_on_screen(prompts: dict[str, list[Prompt]]):
    lengths = sorted(len(prompt.text.split()) for prompt in prompts["train"])
    assert lengths[len(lengths) // 2] <= 15
    assert lengths[-1] == 48
    for rows in prompts.values():
        assert sum('"' in prompt.text for prompt in rows) >= len(rows) // 16


def test_validation_has_fixed_seeds_of_its_own(prompts: dict[str, list[Prompt]]):
    assert len({prompt.seed for prompt in prompts["valid"]}) == 32
    assert all(prompt.seed is None for prompt in prompts["train"])
