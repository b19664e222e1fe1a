"""Tensors whose files were made, lost or exchanged by someone else are refused before anything is read."""

import json
import os
import resource
import struct
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hyvideo.checkpoint import tensors
from hyvideo.checkpoint.tensors import StoredTensors, host_copies, load_tensors, verify_files
from hyvideo.checkpoint.train_state import SaveError, begin_save, latest_checkpoint
from hyvideo.distributed.collectives import gather, local_shard, whole
from hyvideo.training.state import RunState
from tests.support.equal_runs import sign, tensors_of
from tests.support.limits import limited
from tests.support.ranks import run_on_ranks

NAME = "policy.weight"
TWICE = f', "{NAME}": {{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}'.encode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The only tensor file of a checkpoint."""
    weights = {"policy": {"weight": torch.arange(6.0).view(2, 3)}}
    (found,) = begin_save(tmp_path, 1, weights, {}).finish().glob("*.safetensors")
    return found


def with_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a file, and let the manifest say that this is how it was written."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    sign(file.parent)


def sharding(text: str) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["__metadata__"].update(DCP_SHARDING_INFO=text)


def offsets(value: object) -> Callable[[dict[str, Any]], object]:
    return sharding(json.dumps({NAME: {"saved_offsets": value}}))


def entry(**changed: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[NAME].update(changed)


@pytest.mark.parametrize(
    "change",
    [
        *(entry(shape=shape) for shape in ([2, 10**15], [2**40, 2**40], [-2, -3], [3, 2])),
        *(entry(data_offsets=place) for place in ([0, 10**15], [8, 32], [24, 0])),
        *(entry(dtype=dtype) for dtype in ("I32", "os.system")),
        lambda header: header.update({"policy.other": header.pop(NAME)}),
        lambda header: header.update({"policy.other": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
        lambda header: header["__metadata__"].clear() or header[NAME].update(shape=[6]),
        lambda header: json.dumps(header).encode()[:-1] + TWICE,
        lambda header: b"[" * 10**6,
        lambda header: b"not json",
        *map(offsets, ([1, 0], [0, 1], [0], [0, 0, 0], [-1, 0], [2**70, 0], "00", None)),
        *map(sharding, ("{}", "[" * 10**5)),
    ],
)
def test_a_header_that_does_not_fit_is_refused_by_name(file, change):
    with_header(file, change)
    verify_files(file.parent)
    with pytest.raises(ValueError, match=f"'{file.parent}' is not a readable checkpoint: .*Copy it again"):
        StoredTensors(file.parent)


@pytest.mark.parametrize("place", [0, 8, 40, -1, "a longer header"])
def test_an_honest_file_passes_and_one_cut_short_does_not(file, place):
    StoredTensors(file.parent)
    content = file.read_bytes()
    file.write_bytes(content[:place] if isinstance(place, int) else struct.pack("<Q", 2**62) + content[8:])
    for sign_it in (lambda _: None, sign):
        sign_it(file.parent)
        with pytest.raises(ValueError, match="is not a readable checkpoint"):
            StoredTensors(file.parent)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link"])
@pytest.mark.parametrize("beside", [False, True])
def test_what_is_no_regular_file_is_not_opened(file, kind, beside):
    elsewhere = file.rename(file.parents[1] / "elsewhere") if not beside else file
    place = file.with_name("other.safetensors") if beside else file
    if kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(place) if kind == "pipe" else place.symlink_to("/dev/zero" if kind == "device" else elsewhere)
    with pytest.raises(ValueError, match="is a link or no file|is missing"):
        StoredTensors(file.parent)


def sharded_state(mesh_shape: tuple[int, ...], names: tuple[str, ...]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of every kind that a state has, as FSDP2 (one axis) and HSDP (two) hold them."""
    generator = torch.Generator().manual_seed(0)
    state = {
        "policy": {f"w{rows}": torch.randn(rows, 3, generator=generator) for rows in (1, 5, 8)},
        "optimizer": {"w5.momentum_buffer": torch.randn(5, 3, generator=generator).bfloat16()},
    }
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
    for named in state.values():
        named |= {name: distribute_tensor(tensor, mesh, placements) for name, tensor in named.items()}
    state["optimizer"]["w5.step"] = torch.tensor(3.0)
    state["rng"] = {"cpu": torch.arange(50, dtype=torch.uint8)}
    return state


def write_sharded(folder: Path, shape: tuple[int, ...], beside: bool) -> None:
    state = sharded_state(shape, ("replicate", "shard")[-len(shape) :])
    begin_save(folder, 1, state, {}, beside_training=beside).finish()


def read_sharded(folder: Path, shape: tuple[int, ...]) -> bool:
    """Whether every tensor comes back bit for bit, in this rank's shards."""
    expected = sharded_state(shape, ("replicate", "shard")[-len(shape) :])
    received = {g: {n: torch.zeros_like(t) for n, t in named.items()} for g, named in expected.items()}
    load_tensors(folder / "step_1", received)
    pairs = [(expected[group][name], tensor) for group, named in received.items() for name, tensor in named.items()]
    return all(torch.equal(local_shard(one), local_shard(other)) for one, other in pairs)


@pytest.mark.parametrize(("shape", "beside"), [((2,), True), ((4,), False), ((2, 2), False)], ids=["2", "4", "HSDP"])
def test_shards_come_back_bit_for_bit_on_any_number_of_ranks(tmp_path, shape, beside):
    ranks = torch.Size(shape).numel()
    run_on_ranks(ranks, write_sharded, tmp_path, shape, beside)
    assert all(run_on_ranks(ranks, read_sharded, tmp_path, shape))
    assert all(run_on_ranks(6 - ranks, read_sharded, tmp_path, (6 - ranks,)))
    assert tensors_of(tmp_path / "step_1")["optimizer.w5.step"] == 3
    for file in sorted((tmp_path / "step_1").glob("*.safetensors"))[-1:]:
        file.unlink()
        sign(tmp_path / "step_1")
    with pytest.raises(ValueError, match="is not stored as the manifest says, or not all of it"):
        StoredTensors(tmp_path / "step_1")


def test_copies_in_host_memory_lie_where_the_last_ones_lay_and_differ_in_no_bit(monkeypatch):
    monkeypatch.setattr(tensors, "FILE_BYTES", 256)
    generator, places = torch.Generator().manual_seed(0), []
    for _ in range(2):
        state = {f"w{n}": torch.randn(n, 3, generator=generator) for n in (0, 1, 7, 21, 99, 2)}
        state |= {"flags": torch.rand(9, generator=generator) > 0.5, "half": state["w7"].bfloat16().T}
        state |= {"number": torch.tensor(2.5), "random": generator.get_state()}
        copies = host_copies({"policy": state})["policy"]
        places.append([copy.data_ptr() for copy in copies.values() if copy.numel()])
        for name, copy in copies.items():
            assert copy.dtype == state[name].dtype and torch.equal(copy, state[name]), name
            assert copy.is_contiguous()
    assert places[0] == places[1] and len(set(places[0])) == len(places[0])


def save_in_turns(folder: Path) -> list[tuple[int, bool]]:
    """Save different states; returns how often the main rank planned each, and whether it came back as it was."""
    planned, plan = [], DefaultSavePlanner._create_global_plan
    DefaultSavePlanner._create_global_plan = lambda *plans: planned.append(1) or plan(*plans)
    first = sharded_state((2,), ("shard",))
    grown = first | {"anchor": {name: tensor * 3 for name, tensor in first["policy"].items()}}
    halved = first | {"policy": {name: tensor.half() for name, tensor in first["policy"].items()}}
    later = {group: {name: tensor + 1 for name, tensor in named.items()} for group, named in first.items()}
    found = []
    for step, state in enumerate((first, later, grown, halved, later, halved)):
        planned.clear()
        begin_save(folder, step, state, {}, beside_training=step % 2 == 0).finish()
        stored = tensors_of(folder / f"step_{step}")
        expected = {f"{group}.{name}": whole(t) for group, named in state.items() for name, t in named.items()}
        same = (stored[name].dtype == t.dtype and torch.equal(stored[name], t) for name, t in expected.items())
        found.append((len(planned), stored.keys() == expected.keys() and all(same)))
    return found


def test_ranks_plan_again_only_tensors_that_have_changed_and_save_these_bit_for_bit(tmp_path):
    main, other = run_on_ranks(2, save_in_turns, tmp_path)
    assert main == [(1, True), (0, True), (1, True), (1, True), (0, True), (0, True)]
    assert other == [(0, True)] * 6


def finish_where_ranks_differ(folder: Path) -> None:
    """A rank that has not heard of the end of a save yet, then one that cannot write."""
    main = torch.distributed.get_rank() == 0
    state = sharded_state((2,), ("shard",))
    save = begin_save(folder, 1, state, {}, beside_training=True)
    save.written.result()
    run = RunState(*[None] * 7, pending=save if main else replace(save, written=Future()))
    run.finish_save(wait=False)
    assert run.pending and latest_checkpoint(folder) is None
    run.pending = save
    run.finish_save(wait=False)
    assert run.pending is None and gather(latest_checkpoint(folder)) == [folder / "step_1"] * 2
    for beside in (True, False):
        with nullcontext() if main else limited(resource.RLIMIT_FSIZE, 256):  # its files end as on a full disk
            with pytest.raises(SaveError, match=r"Cannot save .*File too large.*Earlier checkpoints are intact"):
                run.pending = begin_save(folder, 2, state, {}, beside_training=beside)
                run.finish_save()
    gather(0)
    assert latest_checkpoint(folder) == folder / "step_1" and not list(folder.glob("*.partial"))


def test_a_save_is_completed_when_all_ranks_have_written_and_fails_on_all_of_them(tmp_path):
    run_on_ranks(2, finish_where_ranks_differ, tmp_path)
