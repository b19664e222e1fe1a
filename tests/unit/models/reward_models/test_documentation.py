"""What docs/rewards.md shows works: its reward in one file, its YAML, its flags."""

import re
import sys
from pathlib import Path

import pytest
import torch

from hyvideo.config.loading import load_config
from hyvideo.config.schema import RewardConfig
from hyvideo.config.settings import SETTINGS
from hyvideo.models import reward_models
from hyvideo.models.reward_models import registry
from hyvideo.models.reward_models.rewards import get_reward_fn, read_requested_rewards
from scripts import make_checks
from scripts.serve_reward import parse_arguments

SHIPPED = [name for name, reward in registry.registered_rewards().items() if reward.__module__.startswith("hyvideo.")]
TEXT = (Path(__file__).parents[4] / "docs" / "rewards.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return found


def test_the_example_is_a_reward_once_its_file_is_there(tmp_path, monkeypatch):
    assert sum(bool(line.strip()) for line in block("python").splitlines()) <= 20
    (tmp_path / "colourfulness.py").write_text(block("python"))
    monkeypatch.setattr(registry, "_REWARDS", dict(registry.registered_rewards()))
    monkeypatch.setattr(reward_models, "__path__", [*reward_models.__path__, str(tmp_path)])
    entry = {"sub_reward": {"colour": 2.0}, "options": {"skip_frames": 1}}
    videos = torch.zeros(2, 3, 8, 8, 3, dtype=torch.uint8)
    videos[0, 0], videos[1, 1:, :, :, 0] = torch.tensor([255, 0, 0], dtype=torch.uint8), 100
    try:
        reward = get_reward_fn(RewardConfig(reward_config={"models": {"colourfulness": entry}}))
        assert reward(videos, ["a", "b"]).total.tolist() == [0, 200]
    finally:
        sys.modules.pop("hyvideo.models.reward_models.colourfulness", None)


def test_the_yaml_is_a_configuration_of_three_rewards(tmp_path):
    (tmp_path / "rewards.yaml").write_text(block("yaml"))
    choices = read_requested_rewards(load_config(["--config", str(tmp_path / "rewards.yaml")]).reward)
    assert [(choice.name, choice.weight, choice.url) for choice in choices] == [
        ("videoalign_local", 1.0, None),
        ("clip_score", 0.1, None),
        ("pick_score", 0.0, "http://10.0.0.5:8000"),
    ]
    assert choices[1].options == {"checkpoint": "ckpts/clip", "num_frames": 8}


def test_every_flag_of_the_document_exists():
    served = vars(parse_arguments(["--reward", "moving_shapes"]))
    written = vars(make_checks.parse_arguments(["--validate", "checks.csv"]))
    named = set(re.findall(r"--([a-z0-9_]+)", TEXT))
    assert {"reward_config", "max_body_mb"} <= named <= {*SETTINGS, *served, *written, "config", "seconds", "repeats"}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_registered_reward_is_in_the_table_with_its_metrics(name):
    (row,) = re.findall(rf"^\| `{name}` \|(.*)", TEXT.partition("\n## ")[0], re.MULTILINE)
    for metric in registry.registered_rewards()[name].metrics:
        assert f"`{metric}`" in row
