"""Whatever stands in flags or files, loading gives a configuration or a ValueError; so does checking it."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from hyvideo.config.loading import load_config, load_saved_config, save_config
from hyvideo.config.schema import Config
from hyvideo.config.settings import GROUPS, SETTINGS
from hyvideo.models.reward_models.rewards import read_requested_rewards
from hyvideo.training.checks import check_config
from tests.support.fuzzing import SCALARS, changed, damaged, fuzz, only_value_errors

RECIPE = (Path(__file__).parents[2] / "configs" / "sage_8gpu.yaml").read_bytes()
NAMES = [*SETTINGS, *GROUPS, "config"]
SPECIAL = st.sampled_from(
    ["${", "${a}", "???", "\\${x}", "1e400", "nan", "9" * 5000, "[" * 2000, "\0", "\ud800", "{}", "--", "="]
)
VALUES = st.one_of(st.text(max_size=20), SPECIAL, st.integers().map(str), st.floats().map(str))
FLAGS = st.one_of(st.sampled_from(NAMES).map("--{}".format), st.text(max_size=12).map("--{}".format))
ARGUMENTS = st.lists(
    st.one_of(FLAGS, VALUES, st.tuples(FLAGS, VALUES).map("=".join)).filter(lambda text: text not in ("--help", "-h")),
    max_size=6,
)
TREES = st.recursive(
    st.one_of(SCALARS, SPECIAL, st.binary(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=4), st.integers()), inner, max_size=4),
    ),
    max_leaves=8,
)
TAGS = (
    *"bool int float null str timestamp binary seq map set omap pairs merge value".split(),
    *("python/object/apply:os.system", "python/name:os.system", "python/tuple", "python/object/new:pathlib.Path"),
)
WORDS = st.one_of(
    st.sampled_from(
        ["0x" + "f" * 5000, "0b", "0o9", "1_0", "1:30", "2020-99-99", "2020-01-01", ".inf", "<<", "=", "~"]
    ),
    st.sampled_from(
        ["*a", "*b", "&a x", "&b [*a, *a]", "'", '"\\ud800"', "|\n  x", "? x", "%YAML 1.1", "---", "!!", "-"]
    ),
    st.sampled_from(list(SETTINGS)),
    st.integers().map(str),
    st.text(max_size=6),
)
NODES = st.recursive(
    st.one_of(WORDS, st.builds("!!{} {}".format, st.sampled_from(TAGS), WORDS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(st.tuples(WORDS, inner).map(": ".join), max_size=3).map(lambda items: f"{{{', '.join(items)}}}"),
        st.builds("!!{} {}".format, st.sampled_from(TAGS), inner),
        inner.map("&a {}".format),
    ),
    max_leaves=5,
)
LINES = st.one_of(
    st.tuples(st.sampled_from(list(SETTINGS)), NODES).map(": ".join),
    st.tuples(st.sampled_from(list(GROUPS)), st.sampled_from(list(SETTINGS)), NODES).map(
        lambda t: f"{t[0]}:\n  {t[1]}: {t[2]}"
    ),
    st.tuples(WORDS, NODES).map(": ".join),
)


def loads_or_teaches(argv, *names):
    """The configuration, or None after a ValueError that says one of `names`."""
    with only_value_errors(*names):
        cfg = load_config(argv)
        assert type(cfg) is Config
        return cfg
    return None


@fuzz(6)
@given(ARGUMENTS)
def test_any_arguments(argv):
    loads_or_teaches(argv, "--", "value", "config file")


@fuzz(6)
@given(st.one_of(TREES, st.dictionaries(st.sampled_from(list(SETTINGS)), TREES, min_size=1, max_size=2)))
def test_any_yaml_tree(tmp_path, tree):
    try:
        text = yaml.safe_dump(tree)
        (tmp_path / "any.yaml").write_text(text, encoding="utf-8")
    except (yaml.YAMLError, UnicodeEncodeError, ValueError):
        return  # nothing that a file could hold
    loads_or_teaches(["--config", str(tmp_path / "any.yaml")], "any.yaml")


@fuzz(6)
@given(st.lists(LINES, min_size=1, max_size=4).map("\n".join))
@example("use_lora: !!bool maybe")
@example("eta: !!timestamp x")
@example("max_steps: 0x" + "f" * 5000)
@example("0")
def test_any_tags_anchors_and_numbers_of_yaml(tmp_path, text):
    (tmp_path / "any.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    loads_or_teaches(["--config", str(tmp_path / "any.yaml")], "any.yaml")


@fuzz(6)
@given(st.one_of(st.binary(max_size=60), damaged(RECIPE)))
def test_any_bytes_in_a_file(tmp_path, content):
    (tmp_path / "any.yaml").write_bytes(content)
    loads_or_teaches(["--config", str(tmp_path / "any.yaml")], "any.yaml")


@fuzz(6)
@given(st.lists(st.tuples(st.sampled_from(list(SETTINGS)), VALUES), min_size=1, max_size=3))
@example([("validation_fixed_size", "--")])  # Python 3.11's argparse makes an empty list of it
def test_any_value_of_any_flag(settings_):
    loads_or_teaches([f"--{name}={value}" for name, value in settings_], "--")


CHOICES = {"models": {"clip_score": {"weight": 1.0, "sub_reward": {"clip": 1}, "options": {"checkpoint": "x"}}}}


@fuzz(6)
@given(st.one_of(changed(CHOICES), changed(CHOICES), TREES))
def test_any_choice_of_rewards_is_read_or_refused(tree):
    cfg = loads_or_teaches([f"--reward_config={json.dumps(tree)}"], "--reward_config") if _writable(tree) else None
    if cfg is not None:
        with only_value_errors("reward_"):
            assert read_requested_rewards(cfg.reward)


def _writable(tree):
    try:
        return bool(json.dumps(tree))
    except (TypeError, ValueError):
        return False


NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([2**31, 2**53 + 1, 10**12, 2**63 - 1, 2**63, 10**400, 0.0, 5e-324, 0.3, 1e39, 1.7e308]),
)


@fuzz(6)
@given(
    st.dictionaries(
        st.sampled_from([setting.name for setting in SETTINGS.values() if setting.kind in (int, float)]), NUMBERS
    ),
    st.integers(1, 100),
)
@example({"batch_size": 7, "num_generations": 10**12}, 8)
@example({"grpo_sampling_steps": 10**400}, 1)
def test_any_numbers_are_checked(tmp_path, numbers, world_size):
    (tmp_path / "any.yaml").write_text(json.dumps(numbers))
    cfg = loads_or_teaches(["--config", str(tmp_path / "any.yaml")], "any.yaml")
    if cfg is not None:
        with only_value_errors(*SETTINGS):
            check_config(cfg, world_size, files=False)


@fuzz(6)
@given(
    st.text(max_size=30),
    st.lists(st.text(max_size=10), min_size=1, max_size=3),
    st.dictionaries(st.text(max_size=6), st.floats(allow_nan=False), max_size=3),
)
def test_what_loads_is_saved_and_read_back_unchanged(tmp_path, prompt, paths, weights):
    (tmp_path / "in.yaml").write_text(
        json.dumps({"negative_prompt": prompt, "train_video_csv": paths, "reward_weights": weights}), encoding="utf-8"
    )
    cfg = loads_or_teaches(["--config", str(tmp_path / "in.yaml")], "in.yaml")
    if cfg is not None:
        save_config(cfg, tmp_path / "out.yaml")
        assert load_saved_config(tmp_path / "out.yaml") == cfg


def test_deeply_nested_input_is_refused(tmp_path):
    (tmp_path / "deep.yaml").write_text("eta: " + "[" * 3000 + "]" * 3000)
    for argv in (["--config", str(tmp_path / "deep.yaml")], ["--reward_weights", "[" * 100000 + "]" * 100000]):
        with pytest.raises(ValueError, match="expected|cannot be read"):
            load_config(argv)


@pytest.mark.parametrize("depth", [10, 30])
def test_aliases_that_multiply_are_refused(tmp_path, depth):
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, depth))]
    (tmp_path / "bomb.yaml").write_text("\n".join([*lines, f"reward_config: *a{depth - 1}"]))
    with pytest.raises(ValueError, match="bomb.yaml"):
        load_config(["--config", str(tmp_path / "bomb.yaml")])
