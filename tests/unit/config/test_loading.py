"""Schema <- YAML files <- flags: the schema is the manual; precedence, spellings, errors that teach, what decides."""

import dataclasses
import json
import re
import shlex
import time
from pathlib import Path

import pytest
from torch import nn

from hyvideo.config import settings
from hyvideo.config.flags import ALIASES, WITHOUT_EFFECT, build_parser
from hyvideo.config.loading import load_config, load_saved_config, save_config
from hyvideo.config.schema import Config, RolloutConfig
from hyvideo.config.settings import GROUPS, SETTINGS, deciding_fields, out_of_range, parse_size, value_of
from hyvideo.training.checks import check_config
from tests.support.release import TRAINING
from tests.support.tiny_model import build_transformer


@pytest.fixture
def yaml_file(tmp_path):
    def write(text, name="run.yaml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def test_later_files_override_earlier_ones_and_flags_override_files_after_which_a_run_is_named(yaml_file):
    first = yaml_file("rollout: {eta: 0.1, cfg_scale: 2.0, sage_clamp: 0.1}", "first.yaml")
    second = yaml_file("rollout: {eta: 0.2, cfg_scale: 3.0}", "second.yaml")
    assert load_config(["--config", first, second]).run.run_name == "first-second"
    assert load_config(["--config", first, second, "--run_name", "mine"]).run.run_name == "mine"
    for files in (["--config", first, second], ["--config", first, "--config", second]):
        rollout = load_config(["--eta", "0.4", *files, "--eta", "0.3"]).rollout  # the last of a repeated flag counts
        assert (rollout.eta, rollout.cfg_scale, rollout.sage_clamp) == (0.3, 3.0, 0.1)


def test_flat_and_grouped_files_say_the_same_in_the_types_of_the_schema(yaml_file):
    flat = "eta: 0.1\nuse_lora: true\nreward_weights: {VQ: 2}"
    grouped = "rollout: {eta: 0.1}\nmodel:\n  use_lora: true\nreward: {reward_weights: {VQ: 2}}\nkl:"
    one, other = (load_config(["--config", yaml_file(text)]) for text in (flat, grouped))
    assert one == other and one.rollout.eta == 0.1
    cfg = load_config(["--config", yaml_file("learning_rate: 3e-5\ncfg_scale: 4"), "--max_steps", "12", "--eta=1"])
    values = (cfg.optimizer.learning_rate, cfg.rollout.cfg_scale, cfg.run.max_steps, cfg.rollout.eta)
    assert values == (3e-5, 4.0, 12, 1.0) and [*map(type, values)] == [float, float, int, float]


def test_booleans_are_spelled_in_many_ways_and_a_bare_flag_means_true():
    for texts, value in (("true True TRUE 1 yes YES on", True), ("false False FALSE 0 no No Off", False)):
        for text in texts.split():
            cfg = load_config(["--use_lora", text, f"--use_muon={text}"])
            assert cfg.model.use_lora is cfg.optimizer.use_muon is value
    cfg = load_config(["--use_lora", "--seed", "7", "--validate_at_step0"])
    assert cfg.model.use_lora and cfg.validation.validate_at_step0 and cfg.run.seed == 7


@pytest.mark.parametrize(
    ("flags", "text", "name", "value"),
    [
        (["--train_video_csv", "a.csv", "b.csv", "--seed", "1"], "", "train_video_csv", ["a.csv", "b.csv"]),
        ([], "train_video_csv: [a.csv, b.csv]", "train_video_csv", ["a.csv", "b.csv"]),
        ([], "train_video_csv: a.csv", "train_video_csv", ["a.csv"]),
        (["--reward_weights", '{"VQ": 2}'], "", "reward_weights", {"VQ": 2.0}),
        (["--reward_weights", "VQ=2", "MQ=1e-1"], "", "reward_weights", {"VQ": 2.0, "MQ": 0.1}),
        ([], "reward_weights: {TA: 1}", "reward_weights", {"TA": 1.0}),
        *((["--kl_target", none], "kl_target: 0.1", "kl_target", None) for none in ("None", "none", "null")),
        (["--remote_reward_url", "none"], "remote_reward_url: http://a", "remote_reward_url", None),
        ([], "reward_weights: '{\"TA\": 1}'", "reward_weights", {"TA": 1.0}),
    ],
)
def test_lists_mappings_and_none_have_several_spellings_and_replace_what_was_there(yaml_file, flags, text, name, value):
    assert value_of(load_config(["--config", yaml_file(text), *flags]), name) == value


LOOP, HUGE = "reward_weights: &a {b: *a}", f"seed: 1{'0' * 5000}"
UNKNOWN = """3 unknown flags (--help lists all):
  '--beta'; here it is called --kl_weight
  '--etta'; the nearest is --eta
  '--resume'; here it is called --resume_from_checkpoint"""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--etta", "1"], "unknown flag '--etta'; the nearest is --eta"),
        (["--clip", "1"], "the nearest is --clip_range"),  # no silent abbreviation
        (["--max_restarts", "3"], "'--max_restarts'; only run_post_train.sh and run_post_train_multinode.sh take it"),
        (["--group_size", "4"], "unknown flag '--group_size'; here it is called --num_generations"),
        (["--beta", "-1", "--seed", "3", "--etta", "1", "--resume"], UNKNOWN),
        (["--seed", "1", "2"], "unexpected value '2'"),
        (["--seed"], "--seed: expected one argument"),
        (["--negative_prompt", "-blurry"], "written --flag=value"),
        (["--eta", "much"], "--eta: expected a number; received 'much'"),
        (["--max_steps", "1e4"], "--max_steps: expected a whole number; received '1e4'"),
        (["--use_lora", "maybe"], "--use_lora: expected true or false; received 'maybe'"),
        (["--sde_window", "slide"], "first, sliding, per_group; received 'slide', the nearest is 'sliding'"),
        (["--reward_weights", "VQ"], "--reward_weights: expected a mapping of names to numbers"),
        (["--negative_prompt", "${oc.env:HOME}"], "are not expanded here"),
        (["--config", "no/such.yaml"], "config file 'no/such.yaml' cannot be read"),
    ],
)
def test_a_wrong_flag_is_named_with_what_was_expected_and_received(argv, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("etta: 0.5", "run.yaml: unknown key 'etta'; the nearest is 'eta'"),
        ("rollout: {etta: 0.5}", "run.yaml: rollout: unknown key 'etta'; the nearest is 'eta'"),
        ("grpo: {eta: 0.5}", "run.yaml: eta belongs to group rollout; received under grpo"),
        ("1: 2", "run.yaml: unknown key 1"),
        ("lr: 1", "run.yaml: unknown key 'lr'; here it is called 'learning_rate'"),
        ("rollout: 5", "run.yaml: rollout is a group and expects settings below it; received 5"),
        ("rollout: {eta: much}", "run.yaml: rollout.eta: expected a number; received 'much'"),
        ("max_steps: 2.5", "run.yaml: max_steps: expected a whole number; received 2.5"),
        ("max_steps: true", "run.yaml: max_steps: expected a whole number; received True"),
        ("eta: null", "run.yaml: eta: expected a number; received None"),
        ("negative_prompt: no", "unless they are quoted"),
        ("negative_prompt: ${run.output_dir}", "are not expanded here"),
        ("train_video_csv: {a: b}", "run.yaml: train_video_csv: expected a list of text"),
        ("eta: 0.5\nrollout: {eta: 0.5}", "run.yaml: rollout.eta: given twice, also as"),
        ("eta: 0.5\neta: 0.6", "duplicate key eta"),
        ("- eta", "must hold `key: value` lines; received a list"),
        *((text, "run.yaml' cannot be read") for text in ("0.5", "seed: !!python/name:os.system x", LOOP, HUGE)),
    ],
)
def test_a_wrong_file_is_named_with_its_key_and_what_was_received(yaml_file, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(["--config", yaml_file(text)])
    with pytest.raises(ValueError, match=re.escape(message)):
        load_saved_config(yaml_file(text))


def test_defaults_are_the_schemas_and_a_saved_config_reads_back_unchanged_and_serves_as_a_file(tmp_path):
    default = load_config([])
    assert type(default) is Config and default.run.run_name == "default"
    default.run.run_name = None
    assert default == Config()
    text = 'a "quoted" prompt, 50 % \n: - \u202e #{}'
    argv = ["--negative_prompt", text, "--eta", "0.1", "--train_video_csv", "a b.csv", "1e5"]
    cfg = load_config([*argv, "--reward_weights", '{"TA": 3}'])
    save_config(cfg, tmp_path / "config.yaml")
    assert load_saved_config(tmp_path / "config.yaml") == cfg
    assert load_config(["--config", str(tmp_path / "config.yaml")]) == cfg
    assert cfg.rollout.negative_prompt == text and cfg.data.train_video_csv == ["a b.csv", "1e5"]


def test_a_key_of_a_million_letters_is_refused_at_once(yaml_file):
    started = time.monotonic()
    for key in ("x" * 1_000_000, "learning_rate" * 80_000):
        with pytest.raises(ValueError, match="unknown key 'xxx|the nearest is 'learning_rate'"):
            load_config(["--config", yaml_file(f"? {key}\n: 1")])
    assert time.monotonic() - started < 5


PATHS = {"output_dir": "~/run", "resume_from_checkpoint": "~/run/checkpoints/step_1", "pretrained_lora_path": "~"}
PATHS |= {"pretrained_model_root": "~/ckpts", "image_root": "~/images", "reward_checkpoint_path": "~/VideoReward"}
PATHS |= {"train_video_csv": ["~/a.csv", "~/b.csv"]}
PATHS["reward_config"] = {"models": {"x": {"sub_reward": {"y": 1.0}, "options": {"checkpoint": "~/clip"}}}}


@pytest.mark.parametrize("name", PATHS)
def test_the_home_folder_is_found_in_every_setting_that_is_a_path_however_it_is_given(yaml_file, monkeypatch, name):
    monkeypatch.setenv("HOME", "/home/ann")
    value = PATHS[name]
    words = [json.dumps(value)] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    group = SETTINGS[name].group
    ways = [[f"--{name}", *words], ["--config", yaml_file(json.dumps({name: value}))]]
    ways.append(["--config", yaml_file(json.dumps({group: {name: value}}), "grouped.yaml")])
    for way in [*ways, [f"--{name}={words[0]}"]] if len(words) == 1 else ways:
        assert value_of(load_config(way), name) == json.loads(json.dumps(value).replace("~", "/home/ann"))


def test_a_configuration_file_in_the_home_folder_is_found_and_a_text_with_a_tilde_inside_stays(yaml_file, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(yaml_file("eta: 0.25")).parent))
    for way in (["--config", "~/run.yaml"], ["--config=~/run.yaml"]):
        assert load_config(way).rollout.eta == 0.25
    for text in ("a~/b", "run ~", "~no such person"):
        assert load_config(["--run_name", text]).run.run_name == text


LAUNCHER = """ --reward_checkpoint_mode "v3" --validate_at_step0 False --validate_video_length 121
--validation_timestep_shift 5.0"""
"""What its launcher adds."""


@pytest.mark.parametrize("more", ["", LAUNCHER], ids=["readme", "launcher"])
def test_the_references_commands_are_taken_as_they_stand(more, capsys):
    cfg = load_config(shlex.split(TRAINING + more))
    check_config(cfg, 8, files=False)
    assert (cfg.kl.kl_coef, cfg.parallel.sp_size, cfg.run.output_dir) == (1e-7, 2, "./outputs")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_flag_without_effect_is_taken_and_says_so_once(name, capsys, monkeypatch):
    for values in ([], ["4"], ["a red circle", "a blue square"]):
        assert load_config([f"--{name}", *values, "--eta", "0.4"]) == load_config(["--eta", "0.4"])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"post_train.py: --{name} has no effect: ")
    monkeypatch.setenv("RANK", "1")
    load_config([f"--{name}", "4"])
    assert capsys.readouterr().err == ""


def test_a_flag_or_switch_of_the_release_sets_ours_hides_none_and_our_own_name_counts_more(tmp_path):
    (tmp_path / "run.yaml").write_text("parallel: {offload: [ema]}\nmodel: {enable_gradient_checkpointing: false}")
    file = ["--config", str(tmp_path / "run.yaml")]

    def loaded(*flags: str) -> tuple[str, list[str]]:
        parallel = load_config([*file, *flags]).parallel
        return parallel.activation_checkpointing, parallel.offload

    assert loaded() == ("none", ["ema"])
    assert loaded("--reference_mode_offload", "True", "--cpu_offload") == ("none", ["anchor", "ema", "weights"])
    assert loaded("--ema_offload", "no", "--enable_gradient_checkpointing") == ("full", [])
    assert loaded("--activation_checkpointing", "cheap", "--enable_gradient_checkpointing") == ("cheap", ["ema"])
    assert loaded("--offload", "reward", "--encoder_offload", "true") == ("none", ["reward"])
    assert loaded("--offload") == ("none", [])
    with pytest.raises(ValueError, match="--ema_offload: expected true or false; received 'maybe'"):
        loaded("--ema_offload", "maybe")
    with pytest.raises(ValueError, match="--offload: expected some of anchor, reward, .*; received .'models'"):
        loaded("--offload", "models")
    assert not set(SETTINGS) & (set(ALIASES) | set(WITHOUT_EFFECT))
    assert {alias.setting for alias in ALIASES.values()} <= {"", *SETTINGS}
    cfg = load_config(["--validation_video_length", "121", "--post_train_type", "grpo"])
    assert (cfg.grpo.algorithm, cfg.validation.validate_video_length) == ("grpo", 121)
    assert load_config(["--video_length=33"]).validation.validate_video_length == 33
    cfg = load_config(["--guidance_scale", "2", "--model_path", "here", "--fps=12"])  # names of generate.py
    assert (cfg.rollout.cfg_scale, cfg.model.pretrained_model_root, cfg.rollout.video_fps) == (2, "here", 12)
    with pytest.raises(ValueError, match="--cfg_scale and --guidance_scale are one setting: keep one"):
        load_config(["--cfg_scale", "1", "--guidance_scale=6"])
    sizes = {("480p_t2v", "none"): (480, 848), ("720p_i2v", "None"): (720, 1280), ("720p_t2v", "480*864"): (480, 864)}
    for (version, size), taken in sizes.items():  # in the reference's spellings
        cfg = load_config(["--validation_fixed_size", size, "--pretrained_transformer_version", version])
        assert parse_size(cfg.validation.validation_fixed_size) == taken


ONLY = {"lora_dropout": "0", "reward_checkpoint_mode": "v3", "kl_compute_mode": "rollout_phase"}


@pytest.mark.parametrize("name", ONLY)
def test_a_name_of_which_one_value_exists_takes_no_other(name, tmp_path):
    assert load_config([f"--{name}", ONLY[name]]) == load_config([])
    with pytest.raises(ValueError, match=f"--{name}: expected only .*; received '0.1'"):
        load_config([f"--{name}", "0.1"])
    (tmp_path / "run.yaml").write_text(f"{name}: 0.1")
    with pytest.raises(ValueError, match=f"run.yaml: {name}: expected only"):
        load_config(["--config", str(tmp_path / "run.yaml")])


def test_settings_have_unique_names_sentences_for_texts_and_for_numbers_ranges():
    names = [field.name for group in dataclasses.fields(Config) for field in dataclasses.fields(group.type)]
    assert len(names) == len(set(names)) == len(SETTINGS) and not set(names) & set(GROUPS)
    assert [name for name, setting in SETTINGS.items() if len(setting.doc) < 20 or setting.doc[-1] != "."] == []
    assert {setting.kind for setting in SETTINGS.values() if setting.within} == {int, float}
    assert list(out_of_range(Config())) == []
    config = load_config(["--eta", "0", "--seed=-1"])
    assert list(out_of_range(config, "seed", "sp_size")) == ["seed is -1, but must lie in [0, 9223372036854775808)"]


def test_lora_targets_name_linear_layers_of_both_streams_of_the_real_transformer_class():
    transformer = build_transformer(num_layers=1)
    linear = [name for name, module in transformer.transformer_blocks.named_modules() if isinstance(module, nn.Linear)]
    targets = Config().model.lora_target_modules
    missed = [name for name in linear if not name.endswith(tuple(f".{target}" for target in targets))]
    assert missed == ["0.norm1.linear", "0.norm1_context.linear"]  # modulation, not attention or feed-forward
    assert [target for target in targets if not any(name.endswith(f".{target}") for name in linear)] == []


def test_the_manual_shows_every_flag_with_group_text_and_default(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    manual = build_parser().format_help()
    flat = " ".join(manual.split())
    prose = [line for line in manual.splitlines() if not line.lstrip().startswith("-")]
    assert 88 < max(map(len, prose)) <= 100  # as wide as the terminal
    for setting in SETTINGS.values():
        assert f"--{setting.name} " in manual
    for about in GROUPS.values():
        assert " ".join(about.split()) in flat
    assert "run_post_train_multinode.sh) also take --max_restarts N: after a lost rank or node" in flat
    assert "[in (0, 100]; default: 0.5]" in flat and '[default: {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}]' in flat
    assert f"{{{','.join(SETTINGS['sde_window'].choices)}}}" in manual


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.kind in (int, float)])
def test_every_number_is_held_to_its_range(name):
    within = SETTINGS[name].within
    low, high = within[1:-1].split(", ")
    outside = [low] if within[0] == "(" else [str(int(float(low)) - 1)]
    if high != "inf":
        outside.append(high if within[-1] == ")" else str(int(float(high)) + 1))
    if SETTINGS[name].kind is float:
        outside += ["nan", "inf", "-inf"]
    for value in outside:
        (message,) = out_of_range(load_config([f"--{name}={value}"]))
        assert message.startswith(f"{name} is ") and message.endswith(f"must lie in {within}")


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.read_when])
def test_a_condition_names_another_setting_and_one_of_its_values(name):
    other, comparison, value = SETTINGS[name].read_when.split()
    config = load_config([f"--{other}={value}"])  # it refuses a value that the setting cannot have
    met = settings.unmet_condition(config, SETTINGS[name]) is None
    assert met == (comparison == "=") and comparison in ("=", "!=")


DECIDING = """--eta=0.6 --learning_rate=2e-5 --seed=43 --batch_size=4 --kl_weight=0 --reward_weights={"TA":1} --use_lora
--reward_config={"models":{}} --reward_aggregation=normalize_then_sum --reward_io=memory --train_video_csv=other.csv
--sde_window=sliding"""


NOT_DECIDING = """--output_dir=elsewhere --run_name=other --resume_from_checkpoint=latest --max_steps=7
--save_interval=1 --log_interval=5 --keep_last=1 --validation_interval=0 --valid_video_csv=v.csv --validate_at_step0
--sp_size=4 --dp_replicate=2 --enable_fsdp=no --remote_reward_url=http://other:8000 --reference_mode_offload --profile
--peak_tflops=900 --reward_async --reward_offload --reward_max_failed=0.1 --remote_reward_timeout=9"""


def test_what_decides_the_result_is_a_deciding_field_and_how_a_number_is_written_or_videos_are_shared_is_none():
    nothing = deciding_fields(load_config([]))
    assert [flag for flag in DECIDING.split() if deciding_fields(load_config([flag])) == nothing] == []
    assert deciding_fields(load_config(NOT_DECIDING.split())) == nothing
    written = Config(rollout=RolloutConfig(cfg_scale=6, eta=0.50))
    assert deciding_fields(written) == deciding_fields(Config()) == deciding_fields(load_config(["--cfg_scale", "6"]))
    two, four = (load_config(["--batch_size", size]) for size in ("2", "4"))
    assert deciding_fields(two, dp_size=4) == deciding_fields(four, dp_size=2)
    assert deciding_fields(two, dp_size=4)["batch_size"] == 8


@pytest.mark.parametrize(
    "text", ["", "352", "352X624", "352x", "x624", "0x16", "-16x16", "352x624x3", "352 x 624", "1e3x64", "٣x٣"]
)
def test_a_size_is_height_then_width_and_anything_else_is_refused_with_what_was_received(text):
    assert parse_size("352x624") == (352, 624)
    with pytest.raises(ValueError, match="HEIGHTxWIDTH") as error:
        parse_size(text)
    assert repr(text) in str(error.value)
