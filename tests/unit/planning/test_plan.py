"""A plan's numbers by hand, what it says of what does not fit, and what the search finds."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config
from hyvideo.distributed.gpus import Gpu
from hyvideo.models.transformer import transformer_flops
from hyvideo.planning.assumptions import Assumptions
from hyvideo.planning.networks import REWARD_BYTES, Networks, read_networks
from hyvideo.planning.plan import GIB, Plan, Search, make_plan, misfit, plan_table
from hyvideo.planning.rehearsal import Rehearsal
from scripts.plan import main
from scripts.rehearse import main as rehearse

GPU = Gpu("test", 4.0, 100.0, 100.0)


@pytest.fixture
def config(tiny_root: Path) -> Callable[..., Config]:
    def load(*flags: str) -> Config:
        shared = ["--pretrained_model_root", str(tiny_root), "--reward_model", "moving_shapes", "--dtype", "fp32"]
        shared += ["--rollout_size", "64x64", "--sample_n_frames", "9", "--validation_interval", "0"]
        return load_config([*shared, *flags])

    return load


@pytest.fixture
def sized_plan(config, monkeypatch):
    """Make a rehearsal a function of its settings, so that what is made of its numbers is quick, and known by hand."""

    def rehearsed(settings: Config, networks: Networks, **others: object) -> Rehearsal:
        """Take 1 GiB per ten frames and rows, halved with each doubling of sp_size; offloading saves 0.5 GiB.

        To keep matrix products takes as much again, and a validation of another size 1 GiB per five frames.
        """
        rollout, look = settings.rollout, settings.validation
        rows = settings.grpo.mini_batch_size_per_update
        rows *= 2 if settings.parallel.activation_checkpointing == "elementwise" else 1
        needed = rollout.sample_n_frames / 10 * rows / settings.parallel.sp_size
        peaks = {"update": (needed - 0.5 * ("anchor" in settings.parallel.offload)) * GIB}
        if look.is_on:
            times = 1 if look.validation_fixed_size == rollout.rollout_size else 2
            peaks["validation"] = times * look.validate_video_length / 10 * GIB
        flops = dict.fromkeys(("rollout", "anchor", "update", *(["validation"] if look.is_on else [])), 1e15)
        sent = {("update", "all-gather", "weights"): 1e12, ("update", "all-to-all", "tokens"): 1e9}
        sizes = {"checkpoint": 400.0, "weights": 200.0, "trained": 100.0, "encoders": 50.0}
        return Rehearsal((4, 5), (1, 2), {"anchor's shard": 1.0}, peaks, flops, sent, {}, {}, {}, {}, sizes, ())

    monkeypatch.setattr("hyvideo.planning.plan.rehearse", rehearsed)
    return config


def plan_of(settings: Config, world_size: int = 1, gpu: Gpu = GPU, **assumptions: object) -> Plan:
    return make_plan(settings, world_size=world_size, gpu=gpu, assumptions=Assumptions(**assumptions))


def search_of(settings: Config, world_size: int = 1, gpu: Gpu = GPU, told: list | None = None) -> Search:
    return Search(settings, world_size, gpu, Assumptions(reserve=0.0), ([] if told is None else told).append)


def test_a_round_and_a_validation_are_their_passes_times_one_pass(config):
    """All of it rehearsed: a transformer, sizes and numbers of videos for which every pass can be counted by hand."""
    flags = "--batch_size 4 --grpo_sampling_steps 6 --use_muon false --cfg_scale 1 --rollout_micro_batch_size 2 "
    flags += "--validation_interval 5 --validation_num_videos 7 --validation_fixed_size 96x64 "
    settings = config(*flags.split(), "--validate_video_length", "5", "--validation_num_inference_steps", "4")
    plan = plan_of(settings, num_text=20, utilisation=0.5)
    done, network = plan.rehearsal, json.loads((Path(plan.networks) / "transformer" / "config.json").read_text())
    one = transformer_flops(network, num_video=3 * 4 * 4, num_text=20)
    passes = 4 * 6  # videos, steps
    assert (plan.videos, plan.prompts, done.surprises) == (4, 1, ())
    assert done.flops["anchor"] == pytest.approx(passes * one.total, rel=0.001)
    assert done.flops["update"] == pytest.approx(passes * (4 * one.linear + 4.5 * one.attention), rel=0.1)
    assert passes * one.total < done.flops["rollout"]  # and decoding
    look = transformer_flops(network, num_video=2 * 6 * 4, num_text=20)
    assert 7 * 4 * look.total < done.flops["validation"]
    trained = done.sizes["trained"]
    assert done.resident["anchor's shard"] == trained and done.resident["optimizer's shard"] >= 2 * trained
    assert plan.checkpoint_bytes == pytest.approx(4 * trained, abs=6e3)  # policy, two moments, anchor; random states
    assert done.peaks["update"] > done.peaks["anchor"] > sum(done.resident.values())
    assert plan.seconds["update"] == pytest.approx(done.flops["update"] / (0.5 * 100e12))  # nothing is sent
    assert plan.gpu_seconds_per_video == pytest.approx(sum(plan.seconds.values()) / 4)
    assert plan.as_json()["flops_per_update"] == plan.flops
    table = plan_table(plan)
    assert "seconds per validation" in table and f"{done.peaks['update'] / GIB:.2f}" in table


def test_what_is_sent_takes_the_time_of_its_link(sized_plan):
    """Weights are sent during the computation, between machines by the network; tokens between its parts."""
    settings, within = sized_plan("--batch_size", "4"), 1e15 / (0.46 * 100e12)
    tokens = 1e9 / 100e9
    assert plan_of(settings, 8).seconds["update"] == pytest.approx(within + tokens)
    assert plan_of(settings, 16, network=1.0).seconds["update"] == pytest.approx(1e12 / 1e9 + tokens)
    assert plan_of(settings, gpu=None).seconds is None


def test_the_whole_run_is_its_rounds_validations_and_checkpoints_and_what_they_cost(sized_plan):
    flags = "--batch_size 4 --updates_per_rollout 2 --max_steps 21 --validation_interval 10 --save_interval 5"
    settings = sized_plan(*flags.split(), "--validate_at_step0", "true")
    plan = plan_of(settings, 8, price_per_gpu_hour=2.5)
    a_round, a_validation, a_save = sum(plan.seconds.values()), plan.validation_seconds, plan.checkpoint_bytes / 2e9
    expected = [11 * a_round, 3 * a_validation, 5 * a_save]
    assert [hours * 3600 for hours in plan.hours.values()] == pytest.approx(expected)
    hours = sum(expected) / 3600
    told = f"21 updates: {hours:.1f} hours, {8 * hours:.0f} GPU-hours, {20 * hours:.0f} at 2.5 per GPU-hour"
    assert plan.whole_run == told
    assert "3 validations" in plan_table(plan) and plan.as_json()["max_steps"] == 21
    beside = plan_of(sized_plan(*flags.split(), "--validate_at_step0", "true", "--async_save", "true"), 8)
    assert list(beside.hours)[2].startswith("1 ") and " at " not in beside.whole_run
    assert plan_of(settings, gpu=None).whole_run == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sp_size", "3"], "sp_size to one of 1, 2, 4, 8"),
        (["--sp_size", "8", "--batch_size", "4"], "heads, which they do not divide: set it to one of 1, 2, 4"),
        (["--batch_size", "3"], "batch_size to a multiple of 4 or to one of 1, 2, 4"),
        (["--rollout_size", "60x64"], "take 9 frames of 64x64"),
    ],
)
def test_a_layout_that_cannot_run_is_refused_with_the_nearest_that_can(sized_plan, flags, words):
    with pytest.raises(ValueError, match=words):
        plan_of(sized_plan(*flags), world_size=8)


def test_what_does_not_fit_names_the_nearest_that_does(sized_plan):
    settings = sized_plan("--sample_n_frames", "41", "--batch_size", "4", "--mini_batch_size_per_update", "2")
    plan, told = plan_of(settings, world_size=8, reserve=0.0), []
    assert not plan.fits and "needs 8.2 GiB" in misfit(plan) and "test has 4" in misfit(plan)
    changes, needed = search_of(settings, 8, told=told).nearest_that_fits()
    assert changes.items() >= {"mini_batch_size_per_update": 1, "offload": ["anchor"]}.items()
    assert needed == pytest.approx(3.6) and "sp_size" not in changes
    assert told[-1].endswith("--offload anchor: 3.6 GiB, fits") and len(told) == len(changes)


def test_what_is_kept_for_the_backward_pass_is_given_up_and_a_shorter_video_is_the_longest_that_fits(sized_plan):
    settings = sized_plan("--sample_n_frames", "37", "--batch_size", "4", "--activation_checkpointing", "elementwise")
    assert search_of(settings).nearest_that_fits() == ({"activation_checkpointing": "cheap"}, pytest.approx(3.7))
    settings = sized_plan("--sample_n_frames", "97", "--batch_size", "4")
    changes, _ = search_of(settings, gpu=Gpu("test", 8.5, 100, 100)).nearest_that_fits()
    assert changes["sample_n_frames"] == 81


def test_where_validation_alone_does_not_fit_its_videos_become_the_rollouts(sized_plan):
    settings = sized_plan("--batch_size", "4", "--validation_interval", "5", "--sample_n_frames", "37")
    assert not plan_of(settings, reserve=0.0).fits
    changes, needed = search_of(settings).nearest_that_fits()
    assert changes.items() >= {"validation_fixed_size": "64x64", "validate_video_length": 37}.items()
    assert needed == pytest.approx(3.7)


def test_possible_sp_sizes_keep_the_videos_of_a_round(sized_plan):
    plans = search_of(sized_plan("--batch_size", "2"), 8).sp_sizes()
    assert [(plan.sp_size, plan.videos) for plan in plans] == [(1, 16), (2, 16), (4, 16)]  # two rows, two heads


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--world_size", "many"], "invalid int value: 'many'"),
        ([], "--world_size"),
        (["--world_size", "0"], "must be above 0; received 0"),
        (["--world_size", "8", "--utilisation", "40"], "at most 1; received 40.0"),
        (["--world_size", "8", "--search"], "name the GPU"),
        (["--world_size", "8", "--gpu_memory", "48"], "no GPUs are known as 'your GPU'"),
        (["--world_size", "8", "--gpu_memory", "0", "--gpu_tflops", "9"], "must be above 0; received {'memory': 0.0"),
        (["--world_size", "8", "--price_per_gpu_hour", "-1"], "must not be below 0; received -1.0"),
        (["--world_size", "8", "--gpu", "TPU"], "no GPUs are known as 'TPU'; expected one of A100-40GB"),
        (["--world_size", "8", "--sp_sise", "2"], "the nearest is --sp_size"),
        (["--world_size", "8", "--json", "/dev/null/plan.json"], "scripts.plan: [Errno 17] File exists: '/dev/null'"),
    ],
)
def test_wrong_flags_of_the_planner_are_refused(capsys, flags, words):
    assert main(flags) == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("form", ["--config={}", "--config {}"])
@pytest.mark.parametrize("program", [main, rehearse], ids=["plan", "rehearse"])
def test_a_planner_does_not_write_over_the_settings_that_it_reads(tmp_path, capsys, program, form):
    settings = tmp_path / "run.yaml"
    settings.write_text("eta: 0.4\n")
    assert program(["--world_size", "8", "--json", str(settings), *form.format(settings).split()]) == 2
    assert "is read by this command" in capsys.readouterr().err and settings.read_text() == "eta: 0.4\n"


def test_the_planner_prints_a_table_and_writes_every_number(sized_plan, tiny_root, tmp_path, capsys):
    flags = ["--world_size", "8", "--gpu", "H100", "--pretrained_model_root", str(tiny_root), "--batch_size", "4"]
    flags += ["--reward_model", "moving_shapes", "--sample_n_frames", "9", "--rollout_size", "64x64"]
    assert main([*flags, "--search", "--json", str(tmp_path / "plan.json")]) == 0
    (printed, progress), written = capsys.readouterr(), json.loads((tmp_path / "plan.json").read_text())
    assert re.match(r"FITS \| \d+ s per update \| \d+\.\d of 79 GiB\n10,000 updates: .* GPU-hours\n\nlayout", printed)
    assert "--sp_size 2 " in progress
    assert "8 = 1 x 8 x 1" in printed and "fits" in printed and "cheapest that fits: sp_size" in printed
    assert written["videos"] == 32 and written["fits"] and written["search"]["cheapest_sp_size"] >= 1
    assert written["seconds"]["update"] > 0 and written["rehearsal"]["peaks"]["update"] > 0
    assert main([*flags, "--reserve", "200", "--search"]) == 1
    refused = capsys.readouterr()
    assert refused.out.startswith("DOES NOT FIT | ") and " of 79 GiB\n" in refused.out
    assert "none of them fits" in refused.out
    assert "None" not in refused.out and "no change of its settings that was tried fits" in refused.out
    assert main([*flags, "--reserve", "200"]) == 1
    assert "--search looks for settings that fit" in capsys.readouterr().err
    assert main(flags[:2] + flags[4:]) == 0
    assert re.match(r"NEEDS \d+\.\d GiB per GPU \| name the --gpu", capsys.readouterr().out)


def test_host_memory_is_what_is_read_there_and_what_stays(sized_plan):
    def host(*flags: str, world_size: int = 4) -> tuple[float, float]:
        """Bytes of weights while loading, and while training: of 200 in weights, 100 trained, 400 in a checkpoint."""
        found = plan_of(sized_plan("--batch_size", "4", *flags), world_size=world_size).host
        return found.loading, found.training

    # Each tensor is read onto the GPU.
    assert host() == host(world_size=1) == host("--enable_fsdp", "false") == (0, 0)
    assert host("--offload", "weights") == (50, 150)
    assert host("--offload", "weights", "--dp_replicate", "2") == (100, 300)
    assert host("--offload", "anchor") == host("--ema_decay", "0.9", "--offload", "ema") == (0, 25)
    assert host("--ema_decay", "0.9") == (0, 0)
    assert host("--async_save") == (0, 100)
    assert host("--use_lora") == host("--use_lora", world_size=1) == (100, 0)
    assert host("--offload", "encoders") == (50, 50)
    reward = REWARD_BYTES["videoalign_local"]
    assert host("--reward_model", "videoalign_local") == (reward, 0)
    assert host("--reward_model", "videoalign_local", "--offload", "reward") == (reward, reward)


def test_the_networks_of_a_judge_lie_beside_those_of_the_reward(config):
    judge = {"models": {"pick_score": {"sub_reward": {"pick": 1.0}}, "text_rendering": {"sub_reward": {"text": 1.0}}}}
    settings = config("--reward_model", "videoalign_local", "--reward_guard", json.dumps(judge))
    networks = read_networks(settings.model, settings.reward)
    assert networks.reward_bytes == REWARD_BYTES["videoalign_local"] + REWARD_BYTES["pick_score"]
    assert networks.unknown_rewards == ("text_rendering",)


def test_the_reserve_grows_with_what_is_rehearsed_up_to_8_gib(sized_plan):
    small = plan_of(sized_plan("--batch_size", "4"))
    assert 1 < small.reserved < 1.5 and small.needed == pytest.approx(small.rehearsal.peak / 2**30 + small.reserved)
    assert Assumptions().reserved(60) == 8
    assert Assumptions(reserve=12.0).reserved(1) == 12
