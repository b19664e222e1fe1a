"""A rehearsed round finds what a GPU would punish, and nothing where all is well."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn

from benchmarks.network import build_inputs
from hyvideo.algorithms.optimizer import build_optimizers
from hyvideo.checkpoint.tensors import host_copies
from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config
from hyvideo.data.host_reads import upload
from hyvideo.models.attention import install_attention
from hyvideo.models.parallelize import prepare_policy, trainable_parameters
from hyvideo.planning import rehearsal
from hyvideo.planning.networks import Networks, read_networks
from hyvideo.planning.own_process import in_own_processes
from hyvideo.planning.peak_memory import PeakMemory
from hyvideo.planning.pretend_device import PretendDevice
from hyvideo.planning.rehearsal import Rehearsal, rehearse
from scripts.rehearse import main

TINY = "--config configs/tiny.yaml --dtype bf16 --enable_fsdp true --batch_size 1 --num_generations 2 ".split()
TINY += "--updates_per_rollout 1 --grpo_sampling_steps 2 --sample_n_frames 5 --rollout_size 32x32 ".split()
TINY += "--mini_batch_size_per_update 1 --rollout_micro_batch_size 1 --validation_interval 0".split()
NUM_TEXT = 60


def small(*flags: str) -> tuple[Config, Networks]:
    config = load_config([*TINY, *flags])
    networks = read_networks(config.model, config.reward)
    return config, replace(networks, transformer={**networks.transformer, "num_layers": 2})


def rehearsal_of(*flags: str, world_size: int = 2) -> Rehearsal:
    return rehearse(*small(*flags), world_size=world_size, num_text=NUM_TEXT)


ONE_PASS = "--algorithm grpo_one_pass --use_lora --sp_size 2 --batch_size 4 --anchor_fraction 0.5 --cfg_scale 4.0"
VALIDATED = "--validation_interval 1 --validation_num_inference_steps 2"
MUCH = f"{VALIDATED} --cfg_scale 4.0 --sp_size 4 --batch_size 2 --gradient_accumulation_steps 2 --sde_window sliding "
MUCH += "--sde_window_size 1 --enable_compile true --encoder_offload true --activation_checkpointing elementwise"
OF_IMAGES = f"{VALIDATED} --pretrained_model_root absent --pretrained_transformer_version 480p_i2v --num_generations 1"
ROUNDS = {
    "full": (2, VALIDATED),
    "lora": (2, "--use_lora true --use_muon false"),
    "an adapter and whole weights": (2, "--use_lora true --enable_fsdp false"),
    "half of the anchor's pass": (2, "--cfg_scale 4.0 --sp_size 2 --batch_size 2 --anchor_fraction 0.5"),
    "four ranks, accumulated, in a window, no product recomputed, compiled, encoders at rest": (4, MUCH),
    "two videos on eight ranks": (8, "--cfg_scale 4.0 --sp_size 8 --batch_size 2"),
    "image to video, with the published encoders": (2, OF_IMAGES),
    "dance in a window": (2, "--sde_type dance_grpo --sde_window per_group --sde_window_size 1"),
    "flow, muon, offload": (2, "--sde_type flow_grpo --use_muon true --reference_mode_offload true"),
    "cps and copies": (2, "--sde_type cps --dp_replicate 2"),
    "nft, an average in host memory": (2, "--algorithm nft --ema_decay 0.9 --ema_offload"),
    "one GPU, an adapter in host memory": (1, f"{VALIDATED} --use_lora --cpu_offload --batch_size 2"),
    "an adapter in one pass": (2, f"{ONE_PASS} --activation_checkpointing elementwise --offload encoders"),
    "nft, guided adapter": (2, "--algorithm nft --use_lora --reference_mode_offload --cfg_scale 4.0"),
}


@pytest.mark.parametrize(("world_size", "flags"), ROUNDS.values(), ids=ROUNDS)
def test_a_round_of_the_real_code_has_no_surprise(world_size: int, flags: str):
    done = rehearsal_of(*flags.split(), world_size=world_size)
    assert done.surprises == ()
    assert not any("mask" in name for phase, name in done.kernels if phase in ("anchor", "update"))
    assert done.flops["update"] > 1.6 * done.flops["anchor"] > 0 and done.flops["rollout"] > 0
    assert done.peaks["update"] > sum(done.resident.values()) > 0


def numbers(config: Config, networks: Networks, *, each: bool) -> list[Counter]:
    """What is counted in a round; with `each`, calls that are alike are made every time."""
    as_part = rehearsal._as_part
    made = (lambda device, function, part, alike: as_part(device, function, part, None)) if each else as_part
    with patch.object(rehearsal, "_as_part", made):
        return rehearsal._rehearse(config, networks, world_size=1, num_text=NUM_TEXT, rounds=[(config, 1)])[0]


def test_alike_prompts_layers_and_tiles_count_as_if_each_was_made():
    sizes = ("--rollout_size", "320x416", "--cfg_scale", "4", "--batch_size", "4")  # tiles and prompts of several sizes
    config, networks = small(*sizes)
    (once,), (each,) = (in_own_processes(numbers, [(config, networks)], each=each)[0] for each in (False, True))
    assert once.keys() == each.keys() and any("rollout/decode" in key for key in once)
    for key, number in each.items():
        assert once[key] == pytest.approx(number, rel=0.01 if key[0] == "peaks" else 0), key


def test_encoders_at_rest_visit_once_for_a_round_and_once_for_a_validation_of_many_batches():
    flags = "--offload encoders --validation_interval 1 --validation_num_videos 8 --validation_fixed_size 32x32"
    done = rehearsal_of(*flags.split(), "--validate_video_length", "5")
    visits = [count for (_, why), count in done.uploads.items() if "visit" in why]
    assert visits == visits[:1] * 2 and visits[0] > 0


EXTRAPOLATED = {
    "validated, a third of the steps compared with the anchor": "--anchor_fraction 0.34",
    "a window, muon, two updates": "--sde_window sliding --sde_window_size 2 --use_muon --updates_per_rollout 2",
    "kept weights, half of the steps": "--grpo_sampling_steps 8 --reshard_after_forward false --timestep_fraction 0.5",
    "nft": "--algorithm nft --ema_decay 0.9",
}
QUICK, *OTHERS = EXTRAPOLATED.values()


@pytest.mark.parametrize("world_size", [8, 64])
def test_few_steps_of_the_recipes_are_rehearsed_with_as_many_anchored_as_in_all_of_them(world_size: int):
    few = rehearsal._few_steps(load_config(["--config", f"configs/sage_{world_size}gpu.yaml"]), world_size)
    asked = [(made.rollout.grpo_sampling_steps, made.kl.anchor_fraction) for made in few]
    assert asked == [(2, 1.0), (3, pytest.approx(2 / 3))]  # 2 of 20 in the recipe


@pytest.mark.parametrize(
    "flags",
    [QUICK, *(pytest.param(flags, marks=pytest.mark.slow) for flags in OTHERS)],
    ids=EXTRAPOLATED,
)
def test_every_number_of_deep_networks_and_many_steps_lies_on_the_line_through_few(flags: str):
    """Peaks, operations, bytes, kernels, reads, uploads: though the largest network is never rehearsed."""
    sizes = "--batch_size 1 --grpo_sampling_steps 6 --validation_interval 1 --validation_num_videos 4 "
    sizes += "--validation_num_inference_steps 4 --validate_video_length 5 --validation_fixed_size 32x32"
    config, networks = small(*sizes.split(), *flags.split())
    networks = replace(networks, transformer={**networks.transformer, "num_layers": 6})
    few, whole = (rehearse(config, networks, world_size=2, num_text=NUM_TEXT, whole=whole) for whole in (False, True))
    assert (few.depths, whole.depths) == ((4, 5), (6,))
    assert max(few.steps) < max(whole.steps) == config.rollout.grpo_sampling_steps
    for name in ("resident", "peaks", "flops", "sent", "kernels", "reads", "uploads", "pinned", "sizes"):
        ours, theirs = getattr(few, name), getattr(whole, name)
        assert ours == pytest.approx(theirs, rel=0.01 if name == "peaks" else 1e-6), name


@pytest.mark.parametrize("recompute", ["full", "elementwise"])
def test_a_rehearsed_update_takes_what_a_real_one_takes(recompute: str):
    """The same update with real tensors on a CPU, their storages counted as they are made and freed."""
    flags = "--dtype fp32 --enable_fsdp false --num_generations 1 --use_muon false --rollout_size 256x256".split()
    flags += f"--enable_gradient_checkpointing true --activation_checkpointing {recompute}".split()
    config, networks = small(*flags)
    done = rehearse(config, networks, world_size=1, num_text=NUM_TEXT)
    transformer = HunyuanVideo15Transformer3DModel.from_config(dict(networks.transformer))
    install_attention(transformer)
    prepare_policy(transformer, gradient_checkpointing=True, recompute=recompute)
    parameters = trainable_parameters(transformer)
    optimizers = build_optimizers(parameters, config.optimizer)
    with PeakMemory() as memory:
        for parameter in transformer.parameters():
            parameter.detach()  # an operation, by which the weight is seen and counted
        for _ in range(2):  # the second update finds the states of the first
            memory.peak = memory.current
            for _ in range(2):  # micro-batches, whose gradients are added
                output = transformer(**build_inputs(transformer, (2, 32, 32), [NUM_TEXT]))[0]
                output.float().square().mean().backward()
                del output
            nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    own = ("transformer's shard", "optimizer's shard")
    beside = sum(held for what, held in done.resident.items() if what not in own)
    assert done.peaks["update"] - beside == pytest.approx(memory.peak, rel=0.02)


def test_values_are_read_back_once_per_decoding_and_update():
    sizes = "--batch_size 4 --num_generations 4 --mini_batch_size_per_update 2 --rollout_micro_batch_size 2"
    done = rehearsal_of(*sizes.split(), "--grpo_sampling_steps", "3", world_size=1)
    reads = {(phase, reason.split(",")[0]): n for (phase, reason), n in done.reads.items() if phase != "validation"}
    of_update = {("update", "the numbers of an update"): 1, ("update", "the gradient's norm"): 1}
    of_update |= {("between", "the gradient of each denoising step"): 1}
    assert reads == {("rollout", "videos go to the host"): 2} | of_update


def miscounted() -> dict[str, tuple[tuple[int, ...], tuple[int, int, int]]]:
    """What a pretended GPU counts and should: uploads, those from pinned memory, and reads; where these differ."""
    wrong, device = {}, PretendDevice()
    one, two, pinned, read, none = (1, 0, 0), (2, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)
    with device:
        table, rows = torch.zeros(4, 4, device=device.device), torch.tensor([0, 2])
        on_device, flag = rows.to(device.device, non_blocking=True), torch.tensor(1.0)
        pieces = {
            "a small copy": (lambda: torch.ones(4).to(device.device), one),
            "a number": (lambda: torch.tensor(1.5, device=device.device), one),
            "a copy into a tensor": (lambda: table.copy_(torch.ones(4, 4)), one),
            "one that does not block": (lambda: torch.ones(4).to(device.device, non_blocking=True), pinned),
            "an upload": (lambda: upload(torch.ones(4), device.device), pinned),
            "an upload of what is there": (lambda: upload(table, device.device), none),
            "host indices": (lambda: table[rows], one),
            "pairs of host indices": (lambda: table[rows, rows], two),
            "host indices of the second axis": (lambda: table[:, rows], one),
            "numbers in brackets": (lambda: table[[0, 2]], one),
            "assigned at host indices": (lambda: table.__setitem__((rows, rows), table[0, :2]), two),
            "a host number assigned at host indices": (lambda: table.__setitem__((rows, rows), flag), (3, 0, 0)),
            "indices on the device": (lambda: table[on_device, on_device], none),
            "slices and single rows": (lambda: (table[1], table[1:3], table[..., None] + flag), none),
            "a value read back": (lambda: table.sum().item(), read),
            "a copy to the host": (lambda: table.cpu(), read),
            "copies for a checkpoint": (lambda: host_copies({"policy": {"one": table, "other": on_device}}), none),
            "host tensors alone": (lambda: rows[rows.clamp(max=1)], none),
        }
        for name, (piece, expected) in pieces.items():
            device.phase = name
            piece()
            noted = (device.uploads, device.pinned, device.reads)
            found = tuple(sum(n for (phase, _), n in counts.items() if phase == name) for counts in noted)
            wrong |= {} if found == expected else {name: (found, expected)}
    return wrong


def test_every_blocking_copy_and_every_upload_of_host_indices_is_counted():
    assert in_own_processes(miscounted, [()])[0] == {}


def turned_twice() -> list[tuple[int, ...]]:
    with PretendDevice() as device:
        return [tuple(torch.zeros(2, 3, device=device.device).t_().shape) for _ in range(2)]


def test_a_tensor_that_is_given_another_shape_has_it_every_time():
    assert in_own_processes(turned_twice, [()])[0] == [(3, 2)] * 2


IN_THE_UPDATE = (
    "update: a matrix product in float64, in tests/support/faulty_algorithms.py",
    "update: a value is read back from the device in tests/support/faulty_algorithms.py",
    "update: the host waits for the device to copy memory that is not pinned in tests/support/faulty",
    "update: the host waits for the device to copy memory that is not pinned in tests/support/faulty",  # two places
)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("FaultyUpdate", IN_THE_UPDATE),
        ("MixesInTheAnchorPass", ["anchor: host and device are mixed by aten.add.Tensor in tests/support/faulty"]),
        ("GathersTheModel", ["are gathered at once, which is nearly the whole model"]),
        ("SelectsByAMask", ["update: aten.index.Tensor needs values to know its size, in tests/support/faulty"]),
    ],
)
def test_planted_faults_are_found_and_named(fault: str, found: Sequence[str]):
    done = rehearsal_of("--algorithm", f"tests.support.faulty_algorithms:{fault}")
    assert len(set(done.surprises)) == len(found)
    assert all(words in said for words, said in zip(found, sorted(done.surprises), strict=True)), done.surprises


def test_the_program_says_what_it_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hyvideo.planning.rehearsal.DEPTHS", (1, 2))
    assert main([*TINY, "--world_size", "2"]) == 0
    told = capsys.readouterr().out
    assert "surprises: none" in told and "the gradient's norm, once per update" in told
    assert "that the host waits for, also of indices: 0\n" in told
    faulty = ("--algorithm", "tests.support.faulty_algorithms:SelectsByHostIndices")
    assert main([*TINY, "--world_size", "2", *faulty]) == 1
    told, complained = capsys.readouterr()
    said = r"also of indices: (\d+)\n  update: \1 times in tests/support/faulty_algorithms.py:\d+ _loss\n"
    assert re.search(said, told)
    assert "scripts.rehearse: update: the host waits for the device" in complained


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--world_size", "3", "--sp_size", "2"], "world size 3 is not divisible by sp_size 2"),
        (["--world_size", "2", "--num_text", "0"], "--num_text must be above 0; received 0"),
        (["--world_size", "2", "--json", "/dev/null/done.json"], "scripts.rehearse: [Errno 17] File exists"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_rehearsed(capsys, monkeypatch, flags, words):
    monkeypatch.setattr("hyvideo.planning.rehearsal.rehearse", None)
    assert main([*TINY, *flags]) == 2 and words in capsys.readouterr().err
