"""Everything about a setting stands in its row: range, when it is read, and the value that omegaconf sees."""

import pytest

from hyvideo.config.flags import range_text
from hyvideo.config.knobs import KNOBS, is_read, out_of_range
from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config

RANGES = {name: knob.facts.within for name, knob in KNOBS.items() if knob.facts.within}


def test_every_number_has_a_range_and_nothing_else_has_one():
    assert set(RANGES) == {name for name, knob in KNOBS.items() if knob.kind in (int, float)}


@pytest.mark.parametrize("name", RANGES)
def test_every_number_is_held_to_its_range(name: str):
    low, high = RANGES[name][1:-1].split(", ")
    outside = [low] if RANGES[name][0] == "(" else [str(int(float(low)) - 1)]
    if high != "inf":
        outside.append(high if RANGES[name][-1] == ")" else str(int(float(high)) + 1))
    if KNOBS[name].kind is float:
        outside += ["nan", "inf", "-inf"]
    for value in outside:
        (message,) = out_of_range(load_config([f"--{name}={value}"]))
        assert message.startswith(f"{name} is ") and message.endswith(f"must lie in {RANGES[name]}")


def test_the_defaults_lie_in_their_ranges_and_only_the_asked_settings_are_looked_at():
    assert list(out_of_range(Config())) == []
    config = load_config(["--eta", "0", "--seed=-1"])
    assert list(out_of_range(config, "seed", "sp_size")) == ["seed is -1, but must lie in [0, 9223372036854775808)"]


@pytest.mark.parametrize("name", [name for name, knob in KNOBS.items() if knob.facts.read_when])
def test_a_condition_names_another_setting_and_one_of_its_values(name: str):
    other, comparison, value = KNOBS[name].facts.read_when.split()
    config = load_config([f"--{other}={value}"])  # it refuses a value that the setting cannot have
    assert is_read(config, KNOBS[name]) == (comparison == "=") and comparison in ("=", "!=")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("eta", "in (0, 100]"),
        ("clip_range", "> 0"),
        ("save_interval", ">= 0, updates"),
        ("remote_reward_timeout", "in (0, 1e9], seconds"),
        ("use_lora", ""),
    ],
)
def test_the_manual_says_range_and_unit(name: str, text: str):
    assert range_text(KNOBS[name]) == text


def test_two_configurations_share_no_list():
    first, second = Config(), Config()
    first.run.trackers.append("wandb")
    assert second.run.trackers == ["tensorboard"] == KNOBS["trackers"].default
