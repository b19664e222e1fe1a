"""A VideoReward folder is read as its authors' code reads it, and one of another kind is refused."""

import logging
from pathlib import Path

import pytest

from hyvideo.models.reward_models.videoalign.network import read_settings
from tests.support.videoreward import STATISTICS, TEXT, write_model_config


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder without weights; settings are all that is read."""
    for step in ("checkpoint-9", "checkpoint-100", "checkpoint-old"):
        (tmp_path / step).mkdir()
    (tmp_path / "detailed_special.txt").write_text(TEXT)
    write_model_config(tmp_path)
    return tmp_path


def only_module(root: Path, text: str) -> None:
    (root / "detailed_special.txt").unlink()
    (root / "prompt_template.py").write_text(text)


def test_the_newest_checkpoint_a_base_beside_it_and_statistics_where_there_are_any_are_taken(root):
    settings = read_settings(root)
    assert settings.checkpoint == root / "checkpoint-100"
    assert settings.base == "nowhere/base" and settings.statistics == STATISTICS
    (root / "base").mkdir()
    write_model_config(root, inference_config=None)
    settings = read_settings(root)
    assert settings.base == str(root / "base") and set(settings.statistics.values()) == {(0.0, 1.0)}


def test_the_text_is_taken_from_the_authors_module_without_running_it_and_named_if_it_is_another(root, caplog):
    only_module(root, f"raise SystemExit\nOTHER = 1\nDETAILED_PROMPT_WITH_SPECIAL_TOKEN = {TEXT!r}\n")
    with caplog.at_level(logging.WARNING):
        assert read_settings(root).text == TEXT
    assert f"{root / 'prompt_template.py'} is not the published one" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "detailed_special.txt").unlink(), "no scoring text"),
        (lambda root: (root / "detailed_special.txt").write_text("{text_prompt}"), "VQ_reward.* exactly once"),
        (lambda root: (root / "detailed_special.txt").write_bytes(b"\xff"), "Cannot load VideoReward .*utf-8"),
        (lambda root: (root / "detailed_special.txt").write_bytes(bytes(2**20 + 1)), "more than"),
        (lambda root: (root / "model_config.json").unlink(), "Cannot read .*model_config.json': .*No such file"),
        (lambda root: (root / "model_config.json").write_text("{"), "Cannot read .*model_config.json"),
        (
            lambda root: (root / "model_config.json").write_text('{"data_config": {}}'),
            "Cannot load VideoReward .*model_config",
        ),
        (lambda root: write_model_config(root, output_dim=2), "output_dim\n.*Input should be 1 or 3"),
        (lambda root: write_model_config(root, reward_token="last"), "reward_token 'special', received 'last'"),
        (lambda root: write_model_config(root, eval_dim=["VQ"]), r"eval_dim .* received \['VQ'\]"),
        (lambda root: write_model_config(root, fps="2"), "fps\n.*valid number.*input_value='2'"),
        (lambda root: write_model_config(root, num_frames=1), "greater than or equal to 2"),
        (lambda root: write_model_config(root, max_frame_pixels=10**10), "less than 67108864"),
        (lambda root: write_model_config(root, TA_std=0), r"statistics.TA.1\n.*greater than 0"),
        (lambda root: write_model_config(root, VQ_mean=float("nan")), r"statistics.VQ.0\n.*finite"),
        (lambda root: [path.rmdir() for path in root.glob("checkpoint-*")], "Cannot load VideoReward .*empty"),
        (lambda root: only_module(root, "A = 1"), "'DETAILED_PROMPT_WITH_SPECIAL_TOKEN'"),
        (lambda root: only_module(root, "def ("), "Cannot load VideoReward .*SyntaxError"),
        (lambda root: only_module(root, "-" * 10**5 + "1"), "Cannot load VideoReward .*(Recursion|Memory)Error"),
    ],
)
def test_what_is_missing_or_of_another_kind_is_named(root, change, message):
    change(root)
    with pytest.raises(ValueError, match=message):
        read_settings(root)
