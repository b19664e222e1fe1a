"""A plan's numbers by hand, what it says of what does not fit, and what the search finds."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config
from hyvideo.distributed.gpus import Gpu
from hyvideo.models.flops import transformer_flops
from hyvideo.planning.assumptions import Assumptions
from hyvideo.planning.memory import REWARD_ACTIVATIONS, Memory, predict_memory
from hyvideo.planning.networks import REWARD_BYTES, read_networks
from hyvideo.planning.plan import GIB, Plan, make_plan
from hyvideo.planning.search import Search, misfit
from hyvideo.planning.simulation import Peaks, SimulatedCase
from hyvideo.planning.table import plan_table
from scripts.plan import SEARCHED, main

GPU = Gpu("test", 4.0, 100.0, 100.0)


@pytest.fixture
def config(tiny_root: Path) -> Callable[..., Config]:
    """Configurations of the tiny random model."""

    def load(*flags: str) -> Config:
        """Load one with some flags."""
        shared = ["--pretrained_model_root", str(tiny_root), "--reward_model", "moving_shapes", "--dtype", "fp32"]
        shared += ["--rollout_size", "64x64", "--sample_n_frames", "9", "--validation_interval", "0"]
        return load_config([*shared, *flags])

    return load


@pytest.fixture
def sized_plan(config, monkeypatch):
    """Make the memory of a plan a function of its settings, without simulations: quick, and known by hand."""

    def predicted(settings: Config, networks: object, **others: object) -> Memory:
        """Take 1 GiB per ten frames and rows and halve it with each doubling of sp_size; offloading saves 0.5 GiB.

        To keep matrix products takes as much again.
        """
        rows = settings.grpo.mini_batch_size_per_update
        rows *= 2 if settings.parallel.activation_checkpointing == "elementwise" else 1
        needed = settings.rollout.sample_n_frames / 10 * rows / settings.parallel.sp_size
        needed -= 0.5 * ("anchor" in settings.parallel.offload)
        return Memory(0, 0, 0, 0, 0, 0, rollout=0, reward=0, anchor_pass=0, update=int(needed * GIB))

    for module in ("plan", "search"):
        monkeypatch.setattr(f"hyvideo.planning.{module}.predict_memory", predicted)
    return config


def plan_of(settings: Config, world_size: int = 1, gpu: Gpu = GPU, **assumptions: object) -> Plan:
    return make_plan(settings, world_size=world_size, gpu=gpu, assumptions=Assumptions(**assumptions))


def test_a_round_is_its_passes_times_one_pass(sized_plan):
    settings = sized_plan("--batch_size", "4", "--grpo_sampling_steps", "6", "--gradient_accumulation_steps", "2")
    plan = plan_of(settings, num_text=10, utilisation=0.5)
    one = transformer_flops(build_config(plan), num_video=3 * 4 * 4, num_text=10)
    videos, steps, rows = 8, 6, 2
    assert plan.videos == videos and plan.prompts == 2
    assert plan.workload.anchor.flops == videos * steps * rows * one.total
    assert plan.workload.update.flops == videos * steps * rows * one.training(recompute="full")
    assert plan.workload.rollout.flops > videos * steps * rows * one.total  # and decoding
    assert plan.as_json()["flops_per_update"] == plan.workload.flops
    assert plan.seconds["update"] == pytest.approx(plan.workload.update.flops / (0.5 * 100e12))  # nothing is sent
    assert plan.gpu_seconds_per_video == pytest.approx(sum(plan.seconds.values()) / 8)


def build_config(plan: Plan) -> dict:
    """The transformer's config in the model folder."""
    return json.loads((Path(plan.networks) / "transformer" / "config.json").read_text())


def test_cfg_and_lora_and_no_anchor_change_the_work(sized_plan):
    base = plan_of(sized_plan("--batch_size", "4"))
    unguided = plan_of(sized_plan("--batch_size", "4", "--cfg_scale", "1"))
    adapter = plan_of(sized_plan("--batch_size", "4", "--use_lora", "true"))
    free = plan_of(sized_plan("--batch_size", "4", "--kl_weight", "0"))
    assert 2 * unguided.workload.update.flops == base.workload.update.flops
    assert adapter.workload.update.flops < base.workload.update.flops
    assert adapter.checkpoint_bytes < base.checkpoint_bytes / 10
    halved = ("--batch_size", "4", "--dtype", "bf16", "--master_weight_type", "bf16")
    assert 2 * plan_of(sized_plan(*halved)).checkpoint_bytes == base.checkpoint_bytes
    assert plan_of(sized_plan(*halved, "--use_lora", "true")).checkpoint_bytes == adapter.checkpoint_bytes
    assert free.workload.anchor.flops == 0 and free.checkpoint_bytes < base.checkpoint_bytes


def test_a_validation_is_its_own_passes_and_no_part_of_a_round(sized_plan):
    base = plan_of(sized_plan("--batch_size", "4"), num_text=10)
    assert base.workload.validation is None and base.validation_seconds is None
    flags = ["--batch_size", "4", "--validation_interval", "5", "--validation_num_videos", "7"]
    flags += ["--validation_fixed_size", "96x64", "--validate_video_length", "5"]
    few, more = (
        plan_of(sized_plan(*flags, "--validation_num_inference_steps", steps), world_size=2, num_text=10)
        for steps in ("1", "4")
    )
    one = transformer_flops(build_config(base), num_video=2 * 6 * 4, num_text=10)
    assert more.workload.validation.flops - few.workload.validation.flops == 4 * 3 * 2 * one.total  # 4 of 7 on a rank
    assert few.workload.validation.flops > 4 * 2 * one.total  # and decoding
    assert more.workload.flops == base.workload.flops
    assert "seconds per validation" in plan_table(more) and "seconds per validation" not in plan_table(base)
    unmeasured = plan_of(sized_plan(*flags), gpu=None)
    assert unmeasured.seconds is None and unmeasured.validation_seconds is None
    once = sized_plan("--batch_size", "4", "--validate_at_step0")
    assert plan_of(once).workload.validation is not None


def test_a_window_of_noisy_steps_costs_updates_and_anchor_in_proportion(sized_plan):
    steps = ["--batch_size", "4", "--grpo_sampling_steps", "8"]
    base = plan_of(sized_plan(*steps)).workload
    window = plan_of(sized_plan(*steps, "--sde_window", "sliding", "--sde_window_size", "2")).workload
    assert window.rollout == base.rollout
    assert 4 * window.update.flops == base.update.flops and 4 * window.anchor.flops == base.anchor.flops


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sp_size", "3"], "sp_size to one of 1, 2, 4, 8"),
        (
            ["--sp_size", "8", "--batch_size", "4"],
            "the 2 attention heads, which they do not divide: set it to one of 1, 2, 4",
        ),
        (["--batch_size", "3"], "batch_size to a multiple of 4 or to one of 1, 2, 4"),
        (["--rollout_size", "60x64"], "use 64x64"),
    ],
)
def test_a_layout_that_cannot_run_is_refused_with_the_nearest_that_can(sized_plan, flags, words):
    with pytest.raises(ValueError, match=words):
        plan_of(sized_plan(*flags), world_size=8)


def test_what_does_not_fit_names_the_nearest_that_does(sized_plan):
    settings = sized_plan("--sample_n_frames", "41", "--batch_size", "4", "--mini_batch_size_per_update", "2")
    plan = plan_of(settings, world_size=8, reserve=0.0)
    assert not plan.fits
    said = misfit(plan, Search(settings, 8, GPU, Assumptions(reserve=0.0)))
    assert "needs 8.2 GiB" in said and "test has 4" in said
    assert "--mini_batch_size_per_update 1 --offload anchor" in said and "3.6 GiB" in said
    assert "--sp_size" not in said


def test_what_is_kept_for_the_backward_pass_is_given_up_step_by_step(sized_plan):
    settings = sized_plan("--sample_n_frames", "37", "--batch_size", "4", "--activation_checkpointing", "elementwise")
    search = Search(settings, 1, GPU, Assumptions(reserve=0.0))
    assert search.nearest_that_fits() == ({"activation_checkpointing": "cheap"}, pytest.approx(3.7))


def test_where_validation_alone_does_not_fit_its_videos_become_the_rollouts(config, monkeypatch):
    def predicted(settings: Config, networks: object, **others: object) -> Memory:
        """Take 1 GiB per ten frames of a rollout, or of a validation of a larger size twice that."""
        frames, length = settings.rollout.sample_n_frames, settings.validation.validate_video_length
        times = 1 if settings.validation.validation_fixed_size == settings.rollout.rollout_size else 2
        needs = {"update": int(frames / 10 * GIB), "validation": int(times * length / 10 * GIB)}
        return Memory(0, 0, 0, 0, 0, 0, rollout=0, reward=0, anchor_pass=0, **needs)

    for module in ("plan", "search"):
        monkeypatch.setattr(f"hyvideo.planning.{module}.predict_memory", predicted)
    settings = config("--batch_size", "4", "--validation_interval", "5", "--sample_n_frames", "37")
    search = Search(settings, 1, GPU, Assumptions(reserve=0.0))
    assert not plan_of(settings, reserve=0.0).fits
    changes = {"validation_fixed_size": "64x64", "validate_video_length": 37}
    assert search.nearest_that_fits() == (changes, pytest.approx(3.7))


def test_a_shorter_video_is_the_longest_that_fits(sized_plan):
    settings, gpu = sized_plan("--sample_n_frames", "97", "--batch_size", "4"), Gpu("test", 8.5, 100, 100)
    changes, _ = Search(settings, 1, gpu, Assumptions(reserve=0.0)).nearest_that_fits()
    assert changes["sample_n_frames"] == 81


def test_a_plan_that_does_not_fit_is_never_told_to_change_nothing(sized_plan):
    """By the interpolated peaks of the search it may fit where it does not by those that were simulated."""
    search = Search(sized_plan("--batch_size", "4"), 1, GPU, Assumptions(reserve=0.0))
    assert search.needed({}) < GPU.memory and search.nearest_that_fits()[0]


def test_where_nothing_fits_it_says_so(sized_plan):
    settings, gpu = sized_plan("--batch_size", "4"), Gpu("small", 0.001, 100, 100)
    said = misfit(plan_of(settings, gpu=gpu, reserve=0.0), Search(settings, 1, gpu, Assumptions(reserve=0.0)))
    assert "use more GPUs, larger ones, or use_lora" in said


def test_the_search_finds_the_largest_that_fits(sized_plan):
    search = Search(sized_plan("--batch_size", "4"), 8, GPU, Assumptions(reserve=0.0))
    assert search.largest("sample_n_frames") == (37, pytest.approx(3.7))  # 4.1 GiB at 41
    assert search.largest("mini_batch_size_per_update") == (4, pytest.approx(3.6))  # 0.9 for each
    assert search.largest("rollout_size")[0] == "1088x1920"  # this memory does not depend on it
    small = Search(sized_plan("--batch_size", "4"), 8, Gpu("none", 0.1, 1, 1), Assumptions())
    assert small.largest("rollout_size") is None


def test_possible_sp_sizes_keep_the_videos_of_a_round(sized_plan):
    plans = Search(sized_plan("--batch_size", "2"), 8, GPU, Assumptions()).sp_sizes()
    assert [(plan.sp_size, plan.videos) for plan in plans] == [(1, 16), (2, 16), (4, 16)]  # two rows, two heads


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--world_size", "many"], "invalid int value: 'many'"),
        ([], "--world_size"),
        (["--world_size", "0"], "must be above 0; received 0"),
        (["--world_size", "100000000000"], "--world_size must be at most 65536; received 100000000000"),
        (["--world_size", "8", "--utilisation", "40"], "at most 1; received 40.0"),
        (["--world_size", "8", "--search"], "name the GPU"),
        (["--world_size", "8", "--gpu", "TPU"], "no GPU 'TPU' is known; expected one of A100-40GB"),
        (["--world_size", "8", "--sp_sise", "2"], "the nearest is --sp_size"),
        (["--world_size", "8", "--json", "/dev/null/plan.json"], "scripts.plan: [Errno 17] File exists: '/dev/null'"),
    ],
)
def test_wrong_flags_of_the_planner_are_refused(capsys, flags, words):
    assert main(flags) == 2 and words in capsys.readouterr().err


def test_the_planner_prints_a_table_and_writes_every_number(sized_plan, tiny_root, tmp_path, capsys):
    flags = ["--world_size", "8", "--gpu", "H100", "--pretrained_model_root", str(tiny_root), "--batch_size", "4"]
    flags += ["--reward_model", "moving_shapes", "--sample_n_frames", "9", "--rollout_size", "64x64"]
    assert main([*flags, "--search", "--json", str(tmp_path / "plan.json")]) == 0
    (printed, progress), written = capsys.readouterr(), json.loads((tmp_path / "plan.json").read_text())
    assert re.match(r"FITS \| \d+ s per update \| \d\.\d of 79 GiB\n\nlayout", printed)
    assert re.findall(r"searching, (\d) of 4: (\w+)", progress) == [
        ("1", "sp_size"),
        *zip("234", SEARCHED, strict=True),
    ]
    assert "8 = 1 x 8 x 1" in printed and "fits" in printed and "cheapest that fits: sp_size 1" in printed
    assert written["videos"] == 32 and written["fits"] and written["search"]["cheapest_sp_size"] == 1
    assert written["seconds"]["update"] > 0 and written["memory"]["update"] > 0
    assert main([*flags, "--reserve", "200", "--search"]) == 1
    refused = capsys.readouterr()
    assert refused.out.startswith("DOES NOT FIT | ") and " of 79 GiB\n" in refused.out
    assert "none of them fits" in refused.out and "rollout_size: no value fits" in refused.out
    assert "None" not in refused.out
    assert "No change of its settings that was tried fits" in refused.err
    assert main(flags[:2] + flags[4:]) == 0
    assert re.match(r"NEEDS \d\.\d GiB per GPU \| name the --gpu", capsys.readouterr().out)


def test_a_small_model_is_planned_by_real_simulations(config):
    plan = plan_of(config("--batch_size", "4"), num_text=20)
    memory = plan.memory
    assert memory.weights == 4 * plan.parameters.total and memory.anchor == 4 * plan.parameters.trained
    assert memory.update > memory.anchor_pass > memory.weights + memory.optimizer + memory.anchor + memory.frozen
    table = plan_table(plan)
    assert "peak: update" in table and f"{memory.update / GIB:.2f}" in table


def test_a_validation_that_takes_most_decides_the_fit(config):
    flags = ["--batch_size", "4", "--rollout_micro_batch_size", "0", "--validation_interval", "5"]
    flags += ["--validation_num_videos", "64", "--validation_fixed_size", "128x128", "--validate_video_length", "17"]
    plan, without = plan_of(config(*flags), num_text=20), plan_of(config(*flags, "--validation_interval", "0"))
    assert without.memory.validation == 0
    assert plan.memory.validation == plan.memory.peak > without.memory.peak
    assert f"{plan.memory.validation / GIB:.2f}" in plan_table(plan)


def test_host_memory_is_what_is_read_there_and_what_stays(sized_plan):
    def host(*flags: str, world_size: int = 4) -> tuple[int, int]:
        """Bytes of weights while loading, and while training."""
        found = plan_of(sized_plan("--batch_size", "4", *flags), world_size=world_size).host
        return found.loading, found.training

    plan = plan_of(sized_plan("--batch_size", "4"), world_size=4)
    whole, saved = 4 * plan.parameters.total, plan.checkpoint_bytes
    # Each tensor is read onto the GPU.
    assert host() == host(world_size=1) == host("--enable_fsdp", "false") == (0, 0)
    assert host("--cpu_offload") == (whole // 4, (whole + saved) // 4)
    assert host("--cpu_offload", "--dp_replicate", "2") == (whole // 2, (whole + saved) // 2)
    assert host("--reference_mode_offload") == (0, plan.parameters.trained)  # 4 bytes, 4 shards
    average = ("--ema_decay", "0.9")
    assert host(*average) == (0, 0)
    assert host(*average, "--ema_offload") == (0, plan.parameters.trained)
    assert host(*average, "--cpu_offload") == (whole // 4, (whole + saved) // 4 + plan.parameters.trained)
    assert host("--async_save") == (0, saved // 4)
    adapted = plan_of(sized_plan("--batch_size", "4", "--use_lora"), world_size=4).parameters
    assert host("--use_lora") == host("--use_lora", world_size=1) == (4 * adapted.trained, 0)
    assert 4 * adapted.trained > 0
    rounded = ("--use_lora", "--dtype", "bf16", "--master_weight_type", "bf16")  # an adapter never is
    assert host(*rounded, *average, "--ema_offload") == (4 * adapted.trained, adapted.trained)
    encoders = read_networks((settings := sized_plan()).model, settings.reward).encoder_bytes
    assert host("--encoder_offload") == (encoders, encoders) and encoders > 0
    reward = REWARD_BYTES["videoalign_local"]
    assert host("--reward_model", "videoalign_local") == (reward, 0)
    assert host("--reward_model", "videoalign_local", "--reward_offload") == (reward, reward)


def test_the_networks_of_a_judge_lie_beside_those_of_the_reward(config):
    judge = {"models": {"pick_score": {"sub_reward": {"pick": 1.0}}, "text_rendering": {"sub_reward": {"text": 1.0}}}}
    settings = config("--reward_model", "videoalign_local", "--reward_guard", json.dumps(judge))
    networks = read_networks(settings.model, settings.reward)
    assert networks.reward_bytes == REWARD_BYTES["videoalign_local"] + REWARD_BYTES["pick_score"]
    assert networks.unknown_rewards == ("text_rendering",)


def test_what_lies_in_host_memory_is_not_planned_on_the_gpu(config):
    memory = plan_of(config("--batch_size", "4", "--cpu_offload"), world_size=2, num_text=20).memory
    assert memory.anchor == memory.weights == memory.optimizer == 0
    assert memory.update > 0


def memory_of(settings: Config, *, world_size: int = 1, encoders: int = 10**8, **peaks: int) -> tuple[Memory, list]:
    """The memory with reward networks of 1,000 bytes, of a transformer with these peaks; and what it was asked of."""
    networks = replace(read_networks(settings.model, settings.reward), reward_bytes=1000, encoder_bytes=encoders)
    given = Peaks(
        **dict.fromkeys(("weights", "states", "trained", "rollout", "anchor", "backward", "optimizer"), 0) | peaks
    )
    seen: list[SimulatedCase] = []

    def peaks_of(config: Config, case: SimulatedCase, world_size: int) -> Peaks:
        seen.append(case)
        return given

    return predict_memory(settings, networks, world_size=world_size, num_text=20, peaks_of=peaks_of), seen


def test_gradients_of_whole_weights_are_averaged_in_a_copy(config):
    def update(world_size: int, *flags: str) -> int:
        """Bytes of the update's peak, with trained weights of a gigabyte."""
        settings = config("--batch_size", "2", "--num_generations", "2", *flags)
        return memory_of(settings, world_size=world_size, trained=10**9, backward=10**9)[0].update

    whole = ("--enable_fsdp", "false")
    assert update(2, *whole) - update(1, *whole) == 10**9
    assert update(2) == update(1)


def test_what_is_on_the_gpu_beside_the_rollout(config):
    def rollout(*flags: str, encoders: int = 10**8) -> int:
        """Bytes of the rollout's peak, with an anchor of 100 bytes."""
        settings = config("--batch_size", "2", "--num_generations", "2", *flags)
        return memory_of(settings, encoders=encoders, trained=100, rollout=2 * 10**8)[0].rollout

    assert rollout() - rollout("--reference_mode_offload") == 100
    assert rollout("--ema_decay", "0.9") - rollout() == 100
    assert rollout("--ema_decay", "0.9", "--ema_offload") == rollout()
    assert rollout() - rollout("--reward_offload") == 1000
    assert rollout() - rollout("--encoder_offload") == 10**8
    assert rollout("--encoder_offload", encoders=10**10) > 10**10  # they are there before the videos
    assert rollout("--reward_async", "--reward_offload") == rollout("--reward_async") > rollout()


def test_the_rollouts_of_a_round_are_denoised_together(config):
    def planned(*flags: str) -> tuple[SimulatedCase, Memory]:
        """What is simulated of the paper's 8 videos per rank, and the memory."""
        settings = config("--batch_size", "2", "--num_generations", "2", "--gradient_accumulation_steps", "4", *flags)
        memory, (case,) = memory_of(settings, world_size=2)
        return case, memory

    one, all_at_once = planned(), planned("--rollout_micro_batch_size", "0")
    assert one[0].rollout_rows == 2 and all_at_once[0].rollout_rows == 16  # two rows with guidance
    assert planned("--rollout_micro_batch_size", "5")[0].rollout_rows == 10
    pairs = planned("--mini_batch_size_per_update", "99", "--grpo_sampling_steps", "3")[0].update_rows
    assert pairs == 2 * 8 * 3
    few, shared = planned("--reward_batch_size", "3")[1], planned("--sp_size", "2")[1]
    assert one[1].reward - few.reward == 5 * REWARD_ACTIVATIONS
    assert one[1].reward - shared.reward == 4 * REWARD_ACTIVATIONS  # two ranks score four each


def test_weights_are_gathered_once_per_micro_batch_of_the_rounds_videos(sized_plan):
    def sent(micro_batch: int) -> int:
        """Bytes of weights that the rollout of 8 videos gathers."""
        flags = ["--batch_size", "2", "--gradient_accumulation_steps", "4", "--rollout_micro_batch_size"]
        return plan_of(sized_plan(*flags, str(micro_batch)), world_size=2).workload.rollout.traffic.weights

    assert 8 * sent(0) == 8 * sent(8) == 2 * sent(2) == sent(1) > 0
    assert sent(3) == 3 * sent(0)


def test_weights_that_stay_gathered_are_there_while_videos_are_decoded_and_scored(config):
    def memory(gathered: int, *flags: str) -> Memory:
        """The memory of a run in which nothing else is large."""
        settings = config("--batch_size", "2", "--num_generations", "2", *flags)
        return memory_of(settings, world_size=2, encoders=10**10, gathered=gathered)[0]

    validated = ("--validation_interval", "5", "--validation_fixed_size", "64x64", "--validate_video_length", "9")
    for flags in (validated, (*validated, "--cpu_offload"), (*validated, "--encoder_offload")):
        few, many = memory(0, *flags), memory(10**9, *flags)
        for phase in ("rollout", "reward", "validation"):
            assert getattr(many, phase) - getattr(few, phase) == 10**9, (phase, flags)
        assert many.update == few.update and many.anchor_pass == few.anchor_pass  # the anchor's swap frees them
    assert memory(10**9, "--encoder_offload").rollout == memory(0, "--encoder_offload").rollout  # as does an update


def test_the_reserve_grows_with_what_is_simulated_up_to_8_gib(sized_plan):
    small = plan_of(sized_plan("--batch_size", "4"))
    assert 1 < small.reserved < 1.5 and small.needed == pytest.approx(small.memory.peak / 2**30 + small.reserved)
    assert Assumptions().reserved(60) == 8
    assert Assumptions(reserve=12.0).reserved(1) == 12
