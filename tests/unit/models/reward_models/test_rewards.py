"""Rewards: weights, several at once, failures, files, overlap and offload; and what docs/rewards.md shows works."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hyvideo.config.loading import load_config
from hyvideo.config.schema import RewardConfig
from hyvideo.config.settings import SETTINGS
from hyvideo.models import reward_models
from hyvideo.models.reward_models import registry
from hyvideo.models.reward_models.registry import RewardModel, register_reward, registered_rewards
from hyvideo.models.reward_models.rewards import WeightedReward, check_rewards, get_reward_fn, read_requested_rewards
from scripts import make_checks
from scripts.serve_reward import parse_arguments
from tests.support.rewards import grey_videos


def reward_of(name: str = "brightness", **settings: Any) -> WeightedReward:
    defaults = {"reward_model": name, "reward_weights": {"brightness": 2.0, "length": -1.0}}
    return get_reward_fn(RewardConfig(**{**defaults, **settings}))


def several(**models: dict[str, Any]) -> RewardConfig:
    return RewardConfig(reward_config={"models": models})


def test_a_neighbours_file_that_cannot_be_imported_is_named_and_skipped(tmp_path, monkeypatch, capsys):
    known = registered_rewards()
    source = "from hyvideo.models.reward_models.registry import *\n@register_reward('half_done')\n"
    source += "class HalfDone(RewardModel):\n    metrics = ('a',)\nimport no_such_library\n"
    (tmp_path / "half_done.py").write_text(source)
    monkeypatch.setattr(reward_models, "__path__", [*reward_models.__path__, str(tmp_path)])
    with pytest.raises(ValueError, match="no reward named 'half_done' is available"):
        reward_of("half_done")
    told = capsys.readouterr().err
    assert f"rewards in {tmp_path}/half_done.py are skipped" in told and "no_such_library" in told
    assert registered_rewards() == known


def model_of(reward: WeightedReward) -> Any:
    return reward._scorers[0].model


@pytest.mark.parametrize("name", ["brightness", "tests.support.rewards:Brightness"])
@pytest.mark.parametrize(
    ("weights", "total"), [({"brightness": 2.0, "length": -1.0}, [19, 38, 57]), ({"length": 3.0}, [3, 6, 9])]
)
def test_the_total_is_the_weighted_sum_and_metrics_without_a_weight_are_scored_too(name, weights, total):
    scores = reward_of(name, reward_weights=weights)(grey_videos(10, 20, 30), ["a", "bb", "ccc"])
    assert scores.metrics["brightness"].tolist() == [10, 20, 30]
    assert scores.metrics["length"].tolist() == [1, 2, 3] and scores.total.tolist() == total


def test_several_rewards_are_weighted_and_metrics_of_one_name_are_told_apart():
    models = {"brightness": {"weight": 0.5, "sub_reward": {"brightness": 2.0}}}
    models["file_brightness"] = {"sub_reward": {"length": 1.0}}
    models["moving_shapes"] = {"weight": 0.0, "sub_reward": {"TA": 1.0}}
    scores = get_reward_fn(several(**models))(grey_videos(10), ["abc"])
    pairs = {f"{name}/{metric}" for name in ("brightness", "file_brightness") for metric in ("brightness", "length")}
    assert set(scores.metrics) == pairs | {"VQ", "MQ", "TA"}
    assert scores.metrics["TA"].isnan().all()  # moving_shapes cannot read the prompt; with weight 0 that fails nothing
    assert scores.total.tolist() == [13]


LENGTH = {"sub_reward": {"length": 1}}
NO_CHECKPOINT = "required argument: 'checkpoint'.*it takes checkpoint, num_frames, scale .reward_checkpoint_path"
WRONG_OPTION = "brightness cannot use its options {'second': 3}.*keyword argument 'second'.*; it takes seconds"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardConfig(reward_model="brigtness"), "named 'brigtness'.*moving_shapes.*or module:Class.*Nearest: bright"),
        (RewardConfig(reward_model="tests.support.rewards:Missing"), "cannot be imported.*module:Class"),
        (RewardConfig(reward_model="no_such_module:Reward"), "cannot be imported"),
        (RewardConfig(reward_model="pathlib:Path"), "must be a subclass of hyvideo.*registry.RewardModel"),
        (RewardConfig(reward_model="brightness"), "brightness has no metric VQ, MQ, TA; expected some of brightness, "),
        (RewardConfig(reward_model="brightness", reward_weights={"length": 0.0}), "at least one weight other than 0"),
        (RewardConfig(reward_model="brightness", reward_weights={"length": float("nan")}), "should be a finite number"),
        (RewardConfig(reward_model="clip_score", reward_weights={"CLIPScore": 1.0}), NO_CHECKPOINT),
        (RewardConfig(remote_reward_url="http://me:pw@host"), "server holds a user((?!pw@).)*$"),
        (several(brightness={"sub_reward": {"length": 1}, "url": "http://pw@["}), "holds a user((?!pw@).)*$"),
        (several(brightness={"sub_reward": {"length": 1}, "url": 5}), "models.brightness.url: Input should be a valid"),
        (RewardConfig(reward_config={"models": {}}), 'reward_config: expected {"models"'),
        (RewardConfig(reward_config={"models": {"a": {}}, "b": 1}), "b: Extra inputs"),
        (several(brightness={"weight": 0, "sub_reward": {"length": 1}}), "at least one weight other than 0"),
        (several(brightness={"sub_reward": {"length": "1"}}), "sub_reward.length: Input should be a valid number"),
        (several(brightness={"sub_rewards": {}}), "models.brightness.sub_rewards: Extra inputs"),
        (several(brightness={"sub_reward": {"length": 1}, "weight": 10**400}), "brightness.weight: Input should be"),
        (several(brightness={"sub_reward": {"length": 1}, "options": {1: 2}}), "options.1.*valid string"),
        (several(brightness=LENGTH | {"options": {"second": 3}}), WRONG_OPTION),
        (
            several(brightness=LENGTH | {"options": {"seconds": 3}, "url": "http://a"}),
            "brightness is scored at http://a; give its options to that server's --reward",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused_at_construction(config, message):
    for refuse in (get_reward_fn, lambda config: check_rewards(config, "ckpts", 24)):
        with pytest.raises(ValueError, match=message):
            refuse(config)


@pytest.mark.parametrize("names", [("Blackening",), ("Blackening", "Brightness"), ("Brightness", "Blackening")])
def test_a_reward_that_writes_into_its_videos_changes_no_other_score_and_not_the_rollouts_videos(names):
    paths = [f"tests.support.rewards:{name}" for name in names]
    models = {path: {"sub_reward": {"brightness": 1.0}, "weight": 1.0 - ("Black" in path) / 2} for path in paths}
    videos = grey_videos(*range(100, 200, 10))
    for batch_size in (1, 3, 10):
        reward = get_reward_fn(RewardConfig(reward_config={"models": models}, reward_batch_size=batch_size))
        scoring = reward.begin()
        for start in range(0, 10, 5):
            scoring.add(videos[start : start + 5], ["a"] * 5)
        scores = reward.finish(scoring)
        found = [values.tolist() for name, values in scores.metrics.items() if name.endswith("brightness")]
        assert found == [[*range(100, 200, 10)]] * len(names)
        assert torch.equal(videos, grey_videos(*range(100, 200, 10)))


def test_a_failed_item_has_no_total_and_the_others_keep_theirs():
    scores = reward_of()(grey_videos(1, 2, 3, 4), ["a", "fail", "a", "infinite"])
    assert scores.total.isnan().tolist() == [False, True, False, True]
    assert scores.total[[0, 2]].tolist() == [1, 5] and scores.metrics["length"].tolist() == [1, 4, 1, 8]


def test_an_error_of_a_reward_is_not_swallowed_and_leaves_it_usable():
    config = several(brightness={"sub_reward": {"brightness": 1}, "options": {"seconds": 0.1}})
    config.reward_batch_size = 1
    reward = get_reward_fn(config)
    with pytest.raises(RuntimeError, match="the reward broke"):
        reward(grey_videos(*range(10)), ["raise", *"abcdefghi"])
    assert len(model_of(reward).calls) < 10  # what had not begun was dropped
    assert reward(grey_videos(3), ["a"]).total.tolist() == [3]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "None"),
        ({}, "{}"),
        ({"brightness": "high", "length": torch.ones(2)}, "{'brightness': 'high'"),
        ({"brightness": torch.ones(3), "length": torch.ones(2)}, "{'brightness': tensor"),
        ({"brightness": [1 + 0j, 2], "length": torch.ones(2)}, "{'brightness': "),
    ],
)
def test_a_reward_that_gives_no_scores_is_named(monkeypatch, given, message):
    reward, message = reward_of(), rf"brightness must give brightness, length as \[2\] real .* it gave {message}"
    monkeypatch.setattr(type(model_of(reward)), "__call__", lambda self, videos, prompts: given)
    with pytest.raises(ValueError, match=message):
        reward(grey_videos(1, 2), ["a", "b"])


@pytest.mark.parametrize("code", [0, "no licence"])
def test_a_reward_that_would_end_the_program_fails_wherever_it_does_so(tmp_path, monkeypatch, capsys, code):
    reward = reward_of()
    monkeypatch.setattr(type(model_of(reward)), "__call__", lambda self, videos, prompts: sys.exit(code))
    with pytest.raises(RuntimeError, match=re.escape(f"the reward brightness called exit({code!r})")):
        reward(grey_videos(1, 2), ["a", "b"])
    monkeypatch.setattr(type(model_of(reward)), "__init__", lambda self, context, seconds=0: sys.exit(code))
    with pytest.raises(ValueError, match=re.escape(f"brightness cannot use its options {{}}: {SystemExit(code)!r}")):
        reward_of()
    (tmp_path / "exiting.py").write_text(f"import sys\nsys.exit({code!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"'exiting:Reward' cannot be imported \(SystemExit: {code}\)"):
        reward_of("exiting:Reward")
    monkeypatch.setattr(reward_models, "__path__", [*reward_models.__path__, str(tmp_path)])
    assert "exiting" not in registered_rewards()
    assert f"exiting.py are skipped, because it cannot be imported: {SystemExit(code)!r}" in capsys.readouterr().err


def test_videos_are_scored_in_blocks_that_do_not_depend_on_how_they_arrive():
    videos, prompts = grey_videos(*range(7)), list("abcdefg")
    reward = reward_of(reward_batch_size=3)
    at_once, scoring = reward(videos, prompts), reward.begin()
    for part in (slice(0, 1), slice(1, 6), slice(6, 7)):
        scoring.add(videos[part], prompts[part])
    assert torch.equal(at_once.total, reward.finish(scoring).total)
    assert model_of(reward).calls == [3, 3, 1] * 2


def test_full_blocks_are_scored_one_at_a_time_while_more_videos_come():
    config = several(brightness={"sub_reward": {"brightness": 2, "length": -1}, "options": {"seconds": 0.01}})
    config.reward_batch_size = 1
    reward = get_reward_fn(config)
    scoring = reward.begin()
    scoring.add(grey_videos(1), ["a"])
    while not model_of(reward).calls:
        pass  # it runs in a thread of its own
    scoring.add(grey_videos(2, 3, 4), ["a"] * 3)
    assert reward.finish(scoring).total.tolist() == [1, 3, 5, 7]
    assert model_of(reward).threads == 1 and model_of(reward)._seconds == 0.01


@pytest.mark.parametrize("reward_io", ["file", "memory"])
def test_a_file_reward_reads_mp4_files_which_are_gone_afterwards_or_frames_when_asked_for(reward_io):
    reward, of_files = reward_of("file_brightness", reward_io=reward_io), reward_io == "file"
    scores = reward(grey_videos(50, 200), ["a", "b"])
    assert scores.metrics["brightness"].tolist() == pytest.approx([50, 200], abs=3 if of_files else 0)
    paths = model_of(reward).paths
    assert [path.suffix for path in paths] == [".mp4", ".mp4"] * of_files
    assert not any(path.exists() for path in paths)


def test_the_files_of_a_reward_are_compressed_as_asked_for():
    noise = torch.randint(256, (1, 9, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    config = RewardConfig(reward_model="file_brightness", reward_weights={"brightness": 1.0})
    rewards = [get_reward_fn(config, crf=crf) for crf in (16, 25)]
    for reward in rewards:
        reward(noise, ["a"])
    (ours,), (published,) = (model_of(reward).sizes for reward in rewards)
    assert published < 0.8 * ours


def test_an_offloaded_reward_is_on_its_device_only_while_it_scores_and_others_do_not_move():
    settled = reward_of()
    settled(grey_videos(1), ["a"])
    assert model_of(settled).devices == []
    config = RewardConfig(reward_model="brightness", reward_weights={"length": 1.0})
    reward = get_reward_fn(config, "meta", offload=True)
    assert model_of(reward).devices == ["cpu"]
    reward(grey_videos(1), ["a"])
    assert model_of(reward).devices == ["cpu", "meta", "cpu"]
    with pytest.raises(RuntimeError, match="the reward broke"):
        reward(grey_videos(1), ["raise"])
    assert model_of(reward).devices[-1] == "cpu"


def test_one_name_is_one_reward_and_the_log_line_says_what_is_scored_and_how():
    with pytest.raises(ValueError, match="'moving_shapes' is MovingShapesReward already"):
        register_reward("moving_shapes")(RewardModel)
    halved = {"weight": 0.5, "sub_reward": {"brightness": 2.0}}
    config = several(moving_shapes={"sub_reward": {"TA": 1.0}}, file_brightness=halved)
    assert get_reward_fn(config).describe() == (
        "moving_shapes (VQ, MQ, TA); file_brightness (brightness, length, through mp4); total = 1 TA + 1 brightness"
    )


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
    expected = [("videoalign_local", 1.0, None), ("clip_score", 0.1, None), ("pick_score", 0.0, "http://10.0.0.5:8000")]
    assert [(choice.name, choice.weight, choice.url) for choice in choices] == expected
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
