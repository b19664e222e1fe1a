"""The schema is the manual: names, defaults and texts of every knob."""

import dataclasses

import pytest

from hyvideo.config.flags import build_parser
from hyvideo.config.knobs import GROUPS, KNOBS, nearest
from hyvideo.config.schema import Config

REFERENCE_DEFAULTS = {
    "pretrained_model_root": "./ckpts",
    "pretrained_transformer_version": "480p_t2v",
    "learning_rate": 1e-5,
    "weight_decay": 0.01,
    "max_steps": 10000,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "batch_size": 2,
    "num_generations": 4,
    "sp_size": 1,
    "dp_replicate": 1,
    "enable_fsdp": True,
    "enable_gradient_checkpointing": True,
    "master_weight_type": "fp32",
    "dtype": "bf16",
    "use_muon": True,
    "seed": 42,
    "eta": 0.5,
    "sage_clamp": 3e-3,
    "cfg_scale": 6.0,
    "grpo_sampling_steps": 20,
    "sample_n_frames": 81,
    "infer_flow_shift_video": 5.0,
    "video_fps": 24,
    "rollout_size": "352x624",
    "clip_range": 1e-4,
    "adv_clip_max": 5.0,
    "timestep_fraction": 1.0,
    "updates_per_rollout": 1,
    "mini_batch_size_per_update": 1,
    "use_same_noise": False,
    "enable_timestep_permutation": True,
    "use_grad_balancing": True,
    "sde_type": "sage_grpo",
    "kl_weight": 1e-5,
    "kl_min_coef": 1e-7,
    "kl_warmup_updates": 100,
    "kl_target": None,
    "kl_schedule": "two_stage",
    "kl_compute_mode": "rollout_phase",
    "use_moving_KL": True,
    "use_dual_kl": True,
    "dual_kl_moving_weight": 1.0,
    "dual_kl_step_weight": 0.1,
    "update_ref_model_step": 10,
    "reward_model": "videoalign_local",
    "reward_weights": {"VQ": 0.5, "MQ": 0.5, "TA": 1.0},
    "reward_checkpoint_mode": "v3",
    "remote_reward_url": None,
    "train_video_csv": [],
    "valid_video_csv": [],
    "save_interval": 100,
    "log_interval": 1,
    "validation_interval": 100,
    "validate_at_step0": False,
    "validate_video_length": 81,
    "validation_fixed_size": "480x864",
    "validation_num_inference_steps": 40,
    "validation_timestep_shift": 5.0,
    "validation_global_seed": 930,
    "resume_from_checkpoint": None,
    "use_lora": False,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "pretrained_lora_path": None,
}


def test_field_names_are_unique_over_groups_and_no_group_has_a_fields_name():
    names = [field.name for group in dataclasses.fields(Config) for field in dataclasses.fields(group.type)]
    assert len(names) == len(set(names)) == len(KNOBS)
    assert not set(names) & set(GROUPS)


def test_every_knob_has_a_manual_text_that_ends_as_a_sentence():
    assert [knob.name for knob in KNOBS.values() if len(knob.doc) < 20 or not knob.doc.endswith(".")] == []


@pytest.mark.parametrize("name", REFERENCE_DEFAULTS)
def test_defaults_are_those_users_scripts_rely_on(name):
    assert KNOBS[name].default == REFERENCE_DEFAULTS[name]


def test_lora_targets_name_linear_layers_of_both_streams_of_the_real_transformer_class():
    from diffusers import HunyuanVideo15Transformer3DModel
    from torch import nn

    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=1,
        attention_head_dim=16,
        num_layers=1,
        num_refiner_layers=1,
        text_embed_dim=8,
        text_embed_2_dim=8,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
    )
    linear = [name for name, module in transformer.transformer_blocks.named_modules() if isinstance(module, nn.Linear)]
    targets = Config().model.lora_target_modules
    missed = [name for name in linear if not name.endswith(tuple(f".{target}" for target in targets))]
    assert missed == ["0.norm1.linear", "0.norm1_context.linear"]  # modulation, not attention or feed-forward
    assert [target for target in targets if not any(name.endswith(f".{target}") for name in linear)] == []


def test_the_manual_shows_every_flag_with_group_text_and_default(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    manual = build_parser().format_help()
    flat = " ".join(manual.split())
    for knob in KNOBS.values():
        assert f"--{knob.name} " in manual
    for about in GROUPS.values():
        assert " ".join(about.split()) in flat
    assert "[in (0, 100]; default: 0.5]" in flat and '[default: {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}]' in flat
    assert f"{{{','.join(KNOBS['sde_type'].choices)}}}" in manual


@pytest.mark.parametrize("columns", [72, 80, 140])
def test_the_manual_is_as_wide_as_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    prose = [line for line in build_parser().format_help().splitlines() if not line.lstrip().startswith("-")]
    assert columns - 12 < max(map(len, prose)) <= columns


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("etta", "eta"),
        ("sp-size", "sp_size"),
        ("USE_MOVING_kl", "use_moving_KL"),
        ("num_generation", "num_generations"),
    ],
)
def test_nearest_ignores_case_and_hyphens(wrong, right):
    assert nearest(wrong, KNOBS) == right
