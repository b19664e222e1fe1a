"""What a configuration says reaches the part that it is about."""

import hashlib
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hyvideo.config.loading import load_config
from hyvideo.grpo.gradient_equalizer import equalizer_scales
from hyvideo.grpo.kl_controller import KLController
from hyvideo.models.reward_models import registry
from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance
from hyvideo.pipelines.sampling import sample_prompts
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.training.build import build_pipeline, check_weights
from tests.support.rewards import Brightness
from tests.support.training import arguments, collect_round, training_of, write_prompts


@pytest.mark.parametrize(
    ("sde_type", "published"),
    [("sage_grpo", False), ("dance_grpo", False), ("flow_grpo", False), ("cps", False), ("cps", True)],
)
def test_the_equalizer_is_that_of_the_runs_own_steps(make_training, sde_type: str, published: bool):
    form = {"published": "cps_equalizer"} if published else {}
    training = make_training(sde_type=sde_type, eta=0.3, sage_clamp=0.02, **form)
    scheduler = FlowMatchDiscreteScheduler(shift=3.0, sage_clamp=0.02)
    scheduler.set_timesteps(4)
    norms = scheduler.gradient_norms(sde_type=sde_type, eta=0.3, published=published)
    assert torch.equal(training.algorithm.scales, equalizer_scales(norms))


def test_the_kl_coefficient_follows_the_configured_schedule(make_training):
    settings = {"kl_weight": 0.01, "kl_min_coef": 1e-4, "kl_coef": 4e-4, "kl_warmup_updates": 3, "kl_target": 0.07}
    controller = make_training(**settings, kl_schedule="milder").algorithm.controller
    coefficients = {"max_coef": 0.01, "min_coef": 1e-4, "start_coef": 4e-4}
    expected = KLController(**coefficients, warmup_updates=3, target=0.07, schedule="milder")
    assert vars(controller) == vars(expected)


def test_a_hang_is_told_in_half_the_time_after_which_a_collective_fails(make_training):
    assert make_training(collective_timeout=60).journal.watchdog.seconds == 30


@pytest.mark.parametrize(
    ("flags", "bounds"),
    [
        (["--kl_weight", "1e-8"], (1e-8, 1e-8)),
        (["--kl_coef", "1e-3"], (1e-7, 1e-5)),
        (["--kl_schedule", "milder", "--kl_min_coef", "5e-6"], (1e-6, 1e-6)),
    ],
)
def test_lambda_is_brought_to_what_its_ceiling_allows(flags: list[str], bounds: tuple[float, float]):
    kl = load_config(flags).kl
    bounded = {"max_coef": kl.kl_weight, "min_coef": kl.kl_min_coef, "start_coef": kl.kl_coef}
    controller = KLController(**bounded, schedule=kl.kl_schedule)
    assert (controller.min_coef, controller.start_coef) == pytest.approx(bounds)


def test_prompts_that_are_edited_while_the_models_load_count_as_they_were_read(tiny_root, tmp_path, monkeypatch):
    csv = write_prompts(tmp_path / "prompts.csv")

    class Editor(Brightness):
        """Another program that appends a prompt in the meantime."""

        def __init__(self, context: RewardContext) -> None:
            super().__init__(context)
            csv.write_text(csv.read_text() + "one more,\n")

    monkeypatch.setitem(registry._REWARDS, "editor", Editor)
    read = hashlib.sha256(csv.read_bytes()).hexdigest()[:16]
    settings = {"reward_model": "editor", "reward_weights": '{"brightness": 1}'}
    training = training_of(arguments(tiny_root, csv, tmp_path / "run", **settings))
    assert len(training.rounds.prompts) == 4 and "one more" in csv.read_text()
    assert training.state.settings[f"the content of {csv}"] == read


@pytest.mark.parametrize("recomputed", ["none", "full", "selective", "cheap", "elementwise"])
def test_blocks_are_recomputed_as_asked(make_training, recomputed: str):
    for block in make_training(activation_checkpointing=recomputed).policy.transformer.transformer_blocks:
        assert (getattr(block.forward, "func", None) is checkpoint) == (recomputed != "none")
        assert ("context_fn" in getattr(block.forward, "keywords", ())) == (recomputed not in ("none", "full"))


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_are_compiled_if_asked(make_training, compiled: bool):
    for block in make_training(enable_compile=compiled).policy.transformer.transformer_blocks:
        called = getattr(block.forward, "args", [block.forward])[0]
        assert hasattr(called, "_torchdynamo_orig_callable") == compiled


@pytest.mark.parametrize(("offload", "place"), [(False, "meta"), (True, "cpu")])
def test_encoders_go_to_the_runs_device_unless_they_rest(make_training, offload: bool, place: str):
    training = make_training(encoder_offload=offload)
    pipeline = build_pipeline(training.config, torch.device("meta"), training.mesh)
    assert pipeline.encoder_offload == offload
    assert {encoder.device.type for encoder in pipeline.encoders} == {place}
    assert pipeline.vae.device.type == pipeline.transformer.device.type == "meta"


@pytest.mark.parametrize(("ahead", "expected"), [(32, [4, 4, 4, 4]), (1, [2, 2, 4, 4]), (0, [1, 2, 3, 4])])
def test_prompts_are_encoded_ahead_up_to_the_bound(make_training, monkeypatch, ahead: int, expected: list[int]):
    monkeypatch.setattr("hyvideo.training.collect.AHEAD", ahead)
    training, staying = (make_training(offload=offload, batch_size=2) for offload in ("encoders", None))
    pipeline, seen = training.policy.pipeline, []
    with patch.object(pipeline, "encode_prompts", wraps=pipeline.encode_prompts) as encode:
        for _ in range(4):  # a prompt each
            received, wanted = collect_round(training), collect_round(staying)
            assert received.rollout.latents.equal(wanted.rollout.latents)
            seen.append(encode.call_count)
    assert seen == expected
    assert len({call.args[0][0] for call in encode.call_args_list}) == 4


def test_a_validation_reads_all_its_prompts_at_one_visit_however_few_it_samples_at_once(make_training):
    at_once = {"rollout_micro_batch_size": 2, "validation_num_videos": 4, "validation_interval": 1}
    training, staying = (make_training(offload=offload, **at_once).validation for offload in ("encoders", None))
    pipeline, prompts = training.policy.pipeline, training.prompts
    with patch.object(pipeline, "encode_prompts", wraps=pipeline.encode_prompts) as encode:
        assert training.sample(prompts).videos.equal(staying.sample(prompts).videos) and len(prompts) == 4
    assert [call.args[0] for call in encode.call_args_list] == [prompts]


def test_validation_videos_have_settings_of_their_own(make_training):
    settings = {"validate_video_length": 9, "validation_fixed_size": "48x32", "validation_global_seed": 5}
    training = make_training(cfg_scale=4.0, validation_interval=1, validation_timestep_shift=7.0, **settings)
    scheduler = FlowMatchDiscreteScheduler(shift=7.0)
    scheduler.set_timesteps(2)
    pipeline, prompts = training.policy.pipeline.with_scheduler(scheduler), training.validation.prompts
    guidance = Guidance(4.0, pipeline.encode([""], glyphs=False))
    expected = sample_prompts(pipeline, prompts, guidance, num_frames=9, size=(48, 32), seed=5, batch_size=2)
    received = training.validation.sample(prompts).videos
    assert received.shape == (2, 9, 48, 32, 3) and torch.equal(received, expected)


@pytest.mark.parametrize("setting", ["reward_config", "reward_guard"])
def test_missing_weights_of_reward_or_judge_are_named_with_those_of_the_model(tmp_path: Path, setting: str):
    rewards = '{"models": {"videoalign_local": {"sub_reward": {"MQ": 1.0}}}}'
    flags = ["--pretrained_model_root", str(tmp_path), "--reward_model", "moving_shapes", f"--{setting}", rewards]
    with pytest.raises(ValueError, match=r"(?s)transformer/480p_t2v.*VideoReward: model_config.json"):
        check_weights(load_config(flags))
