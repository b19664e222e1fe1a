"""The schema is the manual: names, defaults, texts and ranges of every setting, and which of them decide the result."""

import dataclasses

import pytest
from torch import nn

from hyvideo.config.flags import build_parser
from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config, RolloutConfig
from hyvideo.config.settings import GROUPS, SETTINGS, deciding_fields, out_of_range, text_of, unmet_condition
from hyvideo.config.sizes import parse_size
from tests.support.tiny_model import build_transformer

REFERENCE_DEFAULTS = dict(
    pair.strip().split(" ", 1)
    for pair in """
pretrained_model_root ./ckpts; pretrained_transformer_version 480p_t2v; learning_rate 1e-05; weight_decay 0.01;
max_steps 10000; gradient_accumulation_steps 1; max_grad_norm 1.0; batch_size 2; num_generations 4; sp_size 1;
dp_replicate 1; enable_fsdp true; master_weight_type fp32; dtype bf16;
use_muon true; seed 42; eta 0.5; sage_clamp 0.003; cfg_scale 6.0; grpo_sampling_steps 20; sample_n_frames 81;
infer_flow_shift_video 5.0; video_fps 24; rollout_size 352x624; clip_range 0.0001; adv_clip_max 5.0;
timestep_fraction 1.0; updates_per_rollout 1; mini_batch_size_per_update 1; use_same_noise false;
enable_timestep_permutation true; use_grad_balancing true; sde_type sage_grpo; kl_weight 1e-05; kl_min_coef 1e-07;
kl_warmup_updates 100; kl_target none; kl_schedule two_stage; use_moving_KL true;
use_dual_kl true; dual_kl_moving_weight 1.0; dual_kl_step_weight 0.1; update_ref_model_step 10;
reward_model videoalign_local; reward_weights {"VQ": 0.5, "MQ": 0.5, "TA": 1.0};
remote_reward_url none; train_video_csv empty; valid_video_csv empty; save_interval 100; log_interval 1;
validation_interval 100; validate_at_step0 false; validate_video_length 81; validation_fixed_size 480x864;
validation_num_inference_steps 40; validation_timestep_shift 5.0; validation_global_seed 930;
resume_from_checkpoint none; use_lora false; lora_r 8; lora_alpha 16; pretrained_lora_path none
""".split(";")
)
"""Setting -> its default, as one would type it."""


def test_field_names_are_unique_over_groups_and_every_setting_has_a_text_that_ends_as_a_sentence():
    names = [field.name for group in dataclasses.fields(Config) for field in dataclasses.fields(group.type)]
    assert len(names) == len(set(names)) == len(SETTINGS) and not set(names) & set(GROUPS)
    assert [name for name, setting in SETTINGS.items() if len(setting.doc) < 20 or setting.doc[-1] != "."] == []


@pytest.mark.parametrize("name", REFERENCE_DEFAULTS)
def test_defaults_are_those_users_scripts_rely_on(name):
    assert text_of(SETTINGS[name].default) == REFERENCE_DEFAULTS[name]


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


def test_only_numbers_have_ranges_the_defaults_lie_in_them_and_only_the_asked_settings_are_looked_at():
    assert {setting.kind for setting in SETTINGS.values() if setting.within} == {int, float}
    assert list(out_of_range(Config())) == []
    config = load_config(["--eta", "0", "--seed=-1"])
    assert list(out_of_range(config, "seed", "sp_size")) == ["seed is -1, but must lie in [0, 9223372036854775808)"]


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.read_when])
def test_a_condition_names_another_setting_and_one_of_its_values(name):
    other, comparison, value = SETTINGS[name].read_when.split()
    config = load_config([f"--{other}={value}"])  # it refuses a value that the setting cannot have
    assert (unmet_condition(config, SETTINGS[name]) is None) == (comparison == "=") and comparison in ("=", "!=")


DECIDING = """--eta=0.6 --learning_rate=2e-5 --seed=43 --batch_size=4 --kl_weight=0 --reward_weights={"TA":1} --use_lora
--reward_config={"models":{}} --reward_aggregation=normalize_then_sum --reward_io=memory --train_video_csv=other.csv
--sde_window=sliding"""


@pytest.mark.parametrize("flag", DECIDING.split())
def test_what_decides_the_result_is_a_deciding_field(flag):
    assert deciding_fields(load_config([flag])) != deciding_fields(load_config([]))


NOT_DECIDING = """--output_dir=elsewhere --run_name=other --resume_from_checkpoint=latest --max_steps=7
--save_interval=1 --log_interval=5 --keep_last=1 --validation_interval=0 --valid_video_csv=v.csv --validate_at_step0
--sp_size=4 --dp_replicate=2 --enable_fsdp=no --remote_reward_url=http://other:8000 --reference_mode_offload --profile
--peak_tflops=900 --reward_async --reward_offload --reward_max_failed=0.1 --remote_reward_timeout=9"""


def test_what_leaves_the_result_alone_is_none_nor_how_a_number_was_written_nor_ranks_with_as_many_videos():
    assert deciding_fields(load_config(NOT_DECIDING.split())) == deciding_fields(load_config([]))
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
