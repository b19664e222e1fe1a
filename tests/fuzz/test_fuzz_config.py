"""Whatever stands in flags or files: a configuration or a ValueError; so does checking it."""

import json
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config
from hyvideo.config.settings import GROUPS, SETTINGS
from hyvideo.models.reward_models.rewards import read_requested_rewards
from hyvideo.training.checks import check_config
from tests.support.fuzzing import TREES, changed, damaged, fuzz, only_value_errors

RECIPE = (Path(__file__).parents[2] / "configs" / "sage_8gpu.yaml").read_bytes()
NAMES = [*SETTINGS, *GROUPS, "config"]
SPECIAL = ["${", "${a}", "???", "\\${x}", "1e400", "nan", "9" * 5000, "[" * 2000, "\0", "\ud800", "{}", "--", "="]
VALUES = st.text(max_size=20) | st.sampled_from(SPECIAL) | st.integers().map(str) | st.floats().map(str)
FLAGS = (st.sampled_from(NAMES) | st.text(max_size=12)).map("--{}".format)
WORD = FLAGS | VALUES | st.tuples(FLAGS, VALUES).map("=".join)
ARGUMENTS = st.lists(WORD.filter(lambda text: text not in ("--help", "-h")), max_size=6)
TAGS = "bool int float null str timestamp binary seq map set omap pairs merge value python/tuple".split()
TAGS += ["python/object/apply:os.system", "python/name:os.system", "python/object/new:pathlib.Path"]
LARGE = [2**31, 2**53 + 1, 10**12, 2**63 - 1, 2**63, 10**400, 0.0, 5e-324, 0.3, 1e39, 1.7e308]
NUMBERED = [setting.name for setting in SETTINGS.values() if setting.kind in (int, float)]
NUMBERS = st.dictionaries(st.sampled_from(NUMBERED), st.integers(-2, 70) | st.sampled_from(LARGE))
WORDS = st.sampled_from(
    ["0x" + "f" * 5000, "0b", "0o9", "1_0", "1:30", "2020-99-99", "2020-01-01", ".inf", "<<", "=", "~", "--- 1"]
    + ["*a", "*b", "&a x", "&b [*a, *a]", "[*a, {*b : *a}]", "'", '"\\ud800"', "|\n  x", "? x", "%YAML 1.1", "!!", "-"]
)
KEYS = st.sampled_from(NAMES) | WORDS | st.sampled_from(list(GROUPS)).map(lambda name: f"{name}:\n  eta")
NODES = WORDS | VALUES | TREES.map(json.dumps)
MARKS = st.sampled_from(["", "&a ", "&b "]) | st.sampled_from(TAGS).map("!!{} ".format)
LINES = st.lists(st.builds("{}: {}{}".format, KEYS, MARKS, NODES), min_size=1, max_size=4)
CONTENTS = LINES.map(lambda lines: "\n".join(lines).encode(errors="surrogatepass")) | damaged(RECIPE)
CONTENTS |= (st.dictionaries(st.sampled_from(NAMES), TREES, max_size=3) | NUMBERS).map(json.dumps).map(str.encode)
CONTENTS |= st.binary(max_size=60)
CHOICES = {"models": {"clip_score": {"weight": 1.0, "sub_reward": {"clip": 1}, "options": {"checkpoint": "x"}}}}
REWARDS = (changed(CHOICES) | changed(CHOICES) | TREES).map(lambda tree: [f"--reward_config={json.dumps(tree)}"])
GIVEN = st.tuples(st.sampled_from(list(SETTINGS)), VALUES).map("--{0[0]}={0[1]}".format)
COMMANDS = st.one_of(
    st.tuples(ARGUMENTS, st.just(("--", "value", "config file"))),
    st.tuples(st.lists(GIVEN, min_size=1, max_size=3), st.just(("--",))),
    st.tuples(REWARDS, st.just(("--reward_config",))),
)
"""A command line, and what its refusal names one of."""


def loads_or_teaches(argv, *names):
    """The configuration, or None after a ValueError that says one of `names`."""
    with only_value_errors(*names):
        cfg = load_config(argv)
        assert type(cfg) is Config
        return cfg
    return None


@fuzz(2)
@given(COMMANDS)
@example((["--validation_fixed_size=--"], ("--",)))  # Python 3.11's argparse makes an empty list of it
@example((["--reward_weights", "[" * 100000 + "]" * 100000], ("--reward_weights",)))
def test_any_command_line_and_its_rewards_are_read_or_refused(command):
    argv, names = command
    cfg = loads_or_teaches(argv, *names)
    if cfg is not None:
        with only_value_errors("reward_"):
            assert read_requested_rewards(cfg.reward)


MULTIPLYING = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 30))]
"""Thirty lines whose aliases stand for more words than any memory holds."""


@fuzz()
@given(CONTENTS, st.integers(1, 100))
@example(b"eta: " + b"[" * 3000 + b"]" * 3000, 1)
@example("\n".join([*MULTIPLYING, "reward_config: *a29"]).encode(), 1)
@example(b"use_lora: !!bool maybe", 1)
@example(b"eta: !!timestamp x", 1)
@example(b"max_steps: 0x" + b"f" * 5000, 1)
@example(b"0", 1)
@example(b"{batch_size: 7, num_generations: 1000000000000}", 8)
@example(b"grpo_sampling_steps: 1" + b"0" * 400, 1)
def test_any_file_is_read_and_checked_or_refused(tmp_path, content, world_size):
    (tmp_path / "any.yaml").write_bytes(content)
    cfg = loads_or_teaches(["--config", str(tmp_path / "any.yaml")], "any.yaml")
    if cfg is not None:
        with only_value_errors(*SETTINGS):
            check_config(cfg, world_size, files=False)
