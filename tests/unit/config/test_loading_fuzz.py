"""Whatever stands in flags or files, loading gives a configuration or a ValueError."""

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyvideo.config.knobs import GROUPS, KNOBS
from hyvideo.config.loading import load_config, load_saved_config, save_config
from hyvideo.config.schema import Config

NAMES = [*KNOBS, *GROUPS, "config"]
SPECIAL = st.sampled_from(
    ["${", "${a}", "???", "\\${x}", "1e400", "nan", "9" * 5000, "[" * 2000, "\0", "\ud800", "{}", "--", "="]
)
VALUES = st.one_of(st.text(max_size=20), SPECIAL, st.integers().map(str), st.floats().map(str))
FLAGS = st.one_of(st.sampled_from(NAMES).map("--{}".format), st.text(max_size=12).map("--{}".format))
ARGUMENTS = st.lists(
    st.one_of(FLAGS, VALUES, st.tuples(FLAGS, VALUES).map("=".join)).filter(lambda text: text not in ("--help", "-h")),
    max_size=6,
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**320), 10**320),
    st.floats(),
    st.text(max_size=8),
    SPECIAL,
    st.binary(max_size=4),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=4), st.integers()), inner, max_size=4),
    ),
    max_leaves=8,
)
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def loads_or_teaches(argv):
    """The configuration, or None after a ValueError that says something."""
    try:
        cfg = load_config(argv)
    except ValueError as error:
        assert len(str(error)) > 20
        return None
    assert type(cfg) is Config
    return cfg


@QUICK
@given(ARGUMENTS)
def test_any_arguments(argv):
    loads_or_teaches(argv)


@QUICK
@given(st.one_of(TREES, st.dictionaries(st.sampled_from(list(KNOBS)), TREES, min_size=1, max_size=2)))
def test_any_yaml_tree(tmp_path, tree):
    try:
        text = yaml.safe_dump(tree)
        (tmp_path / "any.yaml").write_text(text, encoding="utf-8")
    except (yaml.YAMLError, UnicodeEncodeError, ValueError):
        return  # nothing that a file could hold
    loads_or_teaches(["--config", str(tmp_path / "any.yaml")])


@QUICK
@given(st.binary(max_size=60))
def test_any_bytes_in_a_file(tmp_path, content):
    (tmp_path / "any.yaml").write_bytes(content)
    loads_or_teaches(["--config", str(tmp_path / "any.yaml")])


@QUICK
@given(st.lists(st.tuples(st.sampled_from(list(KNOBS)), VALUES), min_size=1, max_size=3))
def test_any_value_of_any_flag(settings_):
    loads_or_teaches([f"--{name}={value}" for name, value in settings_])


@QUICK
@given(
    st.text(max_size=30),
    st.lists(st.text(max_size=10), min_size=1, max_size=3),
    st.dictionaries(st.text(max_size=6), st.floats(allow_nan=False), max_size=3),
)
def test_what_loads_is_saved_and_read_back_unchanged(tmp_path, prompt, paths, weights):
    (tmp_path / "in.yaml").write_text(
        json.dumps({"negative_prompt": prompt, "train_video_csv": paths, "reward_weights": weights}), encoding="utf-8"
    )
    cfg = loads_or_teaches(["--config", str(tmp_path / "in.yaml")])
    if cfg is not None:
        save_config(cfg, tmp_path / "out.yaml")
        assert load_saved_config(tmp_path / "out.yaml") == cfg


def test_deeply_nested_input_is_refused(tmp_path):
    (tmp_path / "deep.yaml").write_text("eta: " + "[" * 3000 + "]" * 3000)
    for argv in (["--config", str(tmp_path / "deep.yaml")], ["--reward_weights", "[" * 100000 + "]" * 100000]):
        with pytest.raises(ValueError, match="expected|cannot be read"):
            load_config(argv)
