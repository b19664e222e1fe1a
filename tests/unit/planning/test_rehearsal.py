"""A rehearsed round finds what a GPU would punish, and nothing where all is well."""

import re
from dataclasses import replace

import pytest
import torch

from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config
from hyvideo.planning.memory import predict_memory
from hyvideo.planning.networks import Networks, read_networks
from hyvideo.planning.own_process import in_own_process
from hyvideo.planning.pretend_device import PretendDevice
from hyvideo.planning.rehearsal import Rehearsal, rehearse
from hyvideo.planning.simulation import policy_network
from hyvideo.planning.traffic import count_parameters
from hyvideo.planning.workload import workload
from scripts.rehearse import main

TINY = (
    *("--config", "configs/tiny.yaml", "--dtype", "bf16", "--enable_fsdp", "true", "--batch_size", "1"),
    *("--num_generations", "2", "--updates_per_rollout", "1", "--grpo_sampling_steps", "2", "--sample_n_frames", "5"),
    *("--rollout_size", "32x32", "--mini_batch_size_per_update", "1", "--rollout_micro_batch_size", "1"),
)


NUM_TEXT = 60


def small(*flags: str) -> tuple[Config, Networks]:
    """The bundled model with two blocks."""
    config = load_config([*TINY, *flags])
    networks = read_networks(config.model, config.reward)
    return config, replace(networks, transformer={**networks.transformer, "num_layers": 2})


def rehearsal_of(*flags: str, world_size: int = 2) -> Rehearsal:
    return rehearse(*small(*flags), world_size=world_size, num_text=NUM_TEXT)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, (), id="full"),
        pytest.param(2, ("--use_lora", "true", "--use_muon", "false"), id="lora"),
        pytest.param(2, ("--use_lora", "true", "--enable_fsdp", "false"), id="an adapter and whole weights"),
        pytest.param(
            2,
            ("--cfg_scale", "4.0", "--sp_size", "2", "--batch_size", "2", "--anchor_fraction", "0.5"),
            id="guidance on two ranks, half of the anchor's pass",
        ),
        pytest.param(
            4,
            (
                *("--cfg_scale", "4.0", "--sp_size", "4", "--batch_size", "2", "--gradient_accumulation_steps", "2"),
                *("--encoder_offload", "true"),
                *("--activation_checkpointing", "elementwise", "--sde_window", "sliding", "--sde_window_size", "1"),
                *("--enable_compile", "true"),
            ),
            id="tokens on four ranks, accumulated, in a window, no product recomputed, compiled, encoders at rest",
        ),
        pytest.param(8, ("--cfg_scale", "4.0", "--sp_size", "8", "--batch_size", "2"), id="two videos on eight ranks"),
        pytest.param(
            2,
            (
                *("--pretrained_model_root", "absent", "--pretrained_transformer_version", "480p_i2v"),
                *("--num_generations", "1"),
            ),
            id="image to video, with the published encoders",
        ),
        pytest.param(
            2,
            ("--sde_type", "dance_grpo", "--sde_window", "per_group", "--sde_window_size", "1"),
            id="dance in a window",
        ),
        pytest.param(
            2,
            ("--sde_type", "flow_grpo", "--use_muon", "true", "--reference_mode_offload", "true"),
            id="flow, muon and an offloaded anchor",
        ),
        pytest.param(2, ("--sde_type", "cps", "--dp_replicate", "2"), id="cps and copies"),
        pytest.param(
            2,
            ("--algorithm", "nft", "--ema_decay", "0.9", "--ema_offload"),
            id="nft, an average in host memory",
        ),
        pytest.param(1, ("--use_lora", "--cpu_offload", "--batch_size", "2"), id="one GPU, an adapter in host memory"),
        pytest.param(
            2,
            ("--algorithm", "nft", "--use_lora", "--reference_mode_offload", "--cfg_scale", "4.0"),
            id="nft, guided adapter and an offloaded old policy",
        ),
    ],
)
def test_a_round_of_the_real_code_has_no_surprise(world_size: int, flags: tuple[str, ...]):
    done = rehearsal_of(*flags, world_size=world_size)
    assert done.surprises == ()
    assert not any("mask" in name for phase, name in done.kernels if phase in ("anchor", "update"))
    assert done.flops["update"] > 1.6 * done.flops["anchor"] > 0 and done.flops["rollout"] > 0
    assert done.peaks["update"] > done.peaks["resting"] > 0


@pytest.mark.parametrize("resharded", ["true", "false"])
def test_a_plan_counts_what_is_rehearsed(resharded: str):
    """Operations and gathered weights: the anchor's tokens, layers, micro-batches and shards; the update's passes."""
    flags = ("--grpo_sampling_steps", "3", "--batch_size", "2", "--anchor_fraction", "0.67")
    config, networks = small(*flags, "--reshard_after_forward", resharded)
    parameters = count_parameters(policy_network(config, networks.transformer))
    planned = workload(config, networks, parameters, world_size=2, num_text=NUM_TEXT)
    done = rehearse(config, networks, world_size=2, num_text=NUM_TEXT)
    assert done.flops["anchor"] == pytest.approx(planned.anchor.flops, rel=0.001)
    assert done.sent["anchor", "all-gather"] == pytest.approx(planned.anchor.traffic.weights, rel=0.01)
    updated = done.sent["update", "all-gather"] + done.sent["update", "reduce-scatter"]
    assert updated == pytest.approx(planned.update.traffic.weights, rel=0.02)


def test_a_plan_takes_the_memory_that_is_rehearsed():
    """Also the states and the gradients of earlier micro-batches, which the first pass of a run does not have."""
    config, networks = small("--use_muon", "true")
    planned = predict_memory(config, networks, world_size=2, num_text=NUM_TEXT)
    peaks = rehearse(config, networks, world_size=2, num_text=NUM_TEXT).peaks
    for phase, bytes_planned in (
        ("rollout", planned.rollout),
        ("anchor", planned.anchor_pass),
        ("update", planned.update),
    ):
        assert peaks[phase] == pytest.approx(bytes_planned, rel=0.01), phase


def test_values_are_read_back_once_per_decoding_and_update():
    sizes = ("--batch_size", "4", "--num_generations", "4", "--mini_batch_size_per_update", "2")
    sizes += ("--rollout_micro_batch_size", "2", "--grpo_sampling_steps", "3")
    done = rehearsal_of(*sizes, world_size=1)
    reads = {(phase, place.split()[-1]): count for (phase, place), count in done.reads.items()}
    of_update = {("update", "over_micro_batches"): 1, ("update", "step"): 1, ("between", "pop"): 1}
    assert reads == {("rollout", "decode"): 2} | of_update


def copies_and_indices() -> dict[str, tuple[int, int, int]]:
    """What a pretended GPU counts in pieces of code, by their names: uploads, large ones among them, and reads."""
    found, device = {}, PretendDevice()
    with device:
        table, rows = torch.zeros(4, 4, device=device.device), torch.tensor([0, 2])
        on_device, flag = rows.to(device.device, non_blocking=True), torch.tensor(1.0)
        pieces = {
            "a small copy": lambda: torch.ones(4).to(device.device),
            "a number": lambda: torch.tensor(1.5, device=device.device),
            "a copy into a tensor": lambda: table.copy_(torch.ones(4, 4)),
            "a large copy": lambda: torch.zeros(2**15).to(device.device),
            "one that does not block": lambda: torch.ones(4).to(device.device, non_blocking=True),
            "host indices": lambda: table[rows],
            "pairs of host indices": lambda: table[rows, rows],
            "host indices of the second axis": lambda: table[:, rows],
            "numbers in brackets": lambda: table[[0, 2]],
            "assigned at host indices": lambda: table.__setitem__((rows, rows), table[0, :2]),
            "a host number assigned at host indices": lambda: table.__setitem__((rows, rows), flag),
            "indices on the device": lambda: table[on_device, on_device],
            "slices and single rows": lambda: (table[1], table[1:3], table[..., None] + flag),
            "a value read back": lambda: table.sum().item(),
            "a copy to the host": lambda: table.cpu(),
            "host tensors alone": lambda: rows[rows.clamp(max=1)],
        }
        for name, piece in pieces.items():
            device.phase = name
            piece()
            found[name] = tuple(
                sum(count for (phase, _), count in noted.items() if phase == name)
                for noted in (device.uploads, device.waits, device.reads)
            )
    return found


def test_every_blocking_copy_and_every_upload_of_host_indices_is_counted():
    one, two, none = (1, 0, 0), (2, 0, 0), (0, 0, 0)
    assert in_own_process(copies_and_indices) == {
        "a small copy": one,
        "a number": one,
        "a copy into a tensor": one,
        "a large copy": (1, 1, 0),
        "one that does not block": none,
        "host indices": one,
        "pairs of host indices": two,
        "host indices of the second axis": one,
        "numbers in brackets": one,
        "assigned at host indices": two,
        "a host number assigned at host indices": (3, 0, 0),
        "indices on the device": none,
        "slices and single rows": none,
        "a value read back": (0, 0, 1),
        "a copy to the host": (0, 0, 1),
        "host tensors alone": none,
    }


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("ReadsTheLoss", "update: a value is read back from the device in tests/support/faulty_algorithms.py"),
        ("MixesInTheAnchorPass", "anchor: host and device are mixed by aten.add.Tensor in tests/support/faulty"),
        (
            "CopiesFromPageableMemory",
            "update: the host waits for the device to copy memory that is not pinned in tests/",
        ),
        ("MultipliesInFloat64", "update: a matrix product in float64, in tests/support/faulty_algorithms.py"),
        ("GathersTheModel", "are gathered at once, which is nearly the whole model"),
        ("SelectsByAMask", "update: aten.index.Tensor needs values to know its size, in tests/support/faulty"),
    ],
)
def test_a_planted_fault_is_found_and_named(fault: str, found: str):
    done = rehearsal_of("--algorithm", f"tests.support.faulty_algorithms:{fault}")
    assert len(done.surprises) == 1 and found in done.surprises[0], done.surprises


def test_the_program_says_what_it_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hyvideo.planning.rehearsal.DEPTHS", (2, 3))
    assert main([*TINY, "--world_size", "2"]) == 0
    told = capsys.readouterr().out
    assert "surprises: none" in told and "the gradient's norm, once per update" in told
    total, lines = re.search(r"the host waits for, also of indices: (\d+)\n((?:  .+\n)+)", told).groups()
    assert int(total) == sum(map(int, re.findall(r"^  \w+: (\d+) times in ", lines, re.MULTILINE))) > 4
    faulty = ("--algorithm", "tests.support.faulty_algorithms:ReadsTheLoss")
    assert main([*TINY, "--world_size", "2", *faulty]) == 1
    assert "scripts.rehearse: update: a value is read back" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--world_size", "3", "--sp_size", "2"], "world size 3 is not divisible by sp_size 2"),
        (["--world_size", "100000000000"], "--world_size must be at most 65536; received 100000000000"),
        (["--world_size", "2", "--num_text", "0"], "--num_text must be above 0; received 0"),
        (["--world_size", "2", "--json", "/dev/null/done.json"], "scripts.rehearse: [Errno 17] File exists"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_rehearsed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
):
    monkeypatch.setattr("hyvideo.planning.rehearsal.rehearse_extrapolated", None)
    assert main([*TINY, *flags]) == 2 and words in capsys.readouterr().err
