"""Who is where and does which part, what ranks tell each other, and what GPUs are called."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hyvideo.config.loading import load_config
from hyvideo.distributed import collectives
from hyvideo.distributed.gpus import SLOW_LINK, Gpu, find_gpu, named_by_driver
from hyvideo.distributed.mesh import Layout, Mesh, build_mesh, largest_share, layout_of
from hyvideo.training.collect import Assignment, GroupSampler


def test_the_drawing_in_the_docstring_is_true_and_a_runs_layout_has_all_of_its_sizes():
    layout = Layout(8, sp_size=2, dp_replicate=2, batch_size=2, num_generations=4)
    drawn = {row[0]: row[1:] for line in Layout.__doc__.splitlines() if (row := line.replace("|", " ").split())}
    rows = {"sp_rank": layout.sp_rank, "dp_rank": layout.dp_rank, "replica": lambda rank: rank // layout.num_shards}
    for name, of_rank in rows.items():
        assert [int(cell) for cell in drawn[name][:8]] == [of_rank(rank) for rank in range(8)]
    positions = torch.cat([layout.positions(dp_rank) for dp_rank in range(layout.dp_size)])
    assert [int(cell) for cell in drawn["positions"][:8]] == positions.tolist()
    assert (layout.dp_size, layout.dp_shard, layout.num_shards, layout.num_groups) == (4, 2, 4, 2)
    flags = "--sp_size=2 --dp_replicate=4 --batch_size=6 --num_generations=3 --gradient_accumulation_steps=5"
    assert layout_of(load_config(flags.split()), 16) == Layout(16, 2, 4, 6, 3, 5)


def test_an_impossible_layout_is_refused_with_its_numbers():
    for sizes, message in (
        ((0,), "world_size must be at least 1; received 0"),
        ((8, 3), "world size 8 is not divisible by sp_size 3: set sp_size to one of 1, 2, 4, 8"),
        ((16, 2, 3), r"8 data-parallel ranks \(world size 16 / sp_size 2\) are not divisible by dp_replicate 3"),
        ((2, 1, 1, 3, 2), "batch_size 3 and num_generations 2 must divide one another"),
        ((3, 1, 1, 2, 4), r"batch_size 2 x 3 data-parallel ranks .* = 6 videos, not a multiple of num_generations 4"),
        ((2, 1, 3, 3, 2), "dp_replicate 3.*\n.*batch_size 3 and num_generations 2"),  # each broken rule has its line
    ):
        with pytest.raises(ValueError, match=message):
            Layout(*sizes)


@pytest.mark.parametrize("num_rollouts", [1, 2])
@pytest.mark.parametrize(("batch_size", "dp_size"), [(4, 1), (1, 4), (2, 4), (4, 3), (8, 2)])
def test_in_round_order_the_videos_are_those_of_one_rank_and_groups_are_contiguous(batch_size, dp_size, num_rollouts):
    def assignments(layout: Layout, rank: int) -> list[Assignment]:
        sampler = GroupSampler(5, layout.num_groups, 4, layout.positions(rank), seed=3)
        return [sampler.next_round() for _ in range(3)][-1]

    layout = Layout(dp_size, batch_size=batch_size, num_generations=4, num_rollouts=num_rollouts)
    parts = [assignments(layout, rank) for rank in range(dp_size)]
    tensors = [torch.tensor([(a.prompt_index, a.generation) for a in part]) for part in parts]
    order = torch.cat([layout.positions(rank) for rank in range(dp_size)]).argsort()
    joined = torch.cat(tensors)[order]
    alone = assignments(Layout(batch_size=layout.num_videos, num_generations=4), 0)
    assert [Assignment(*pair) for pair in joined.tolist()] == alone
    assert (joined[:, 0].reshape(-1, 4) == joined[::4, :1]).all()
    for rank, part in enumerate(tensors):
        assert torch.equal(joined[layout.positions(rank)], part)


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 4))
def test_every_video_is_sampled_by_one_data_parallel_rank_and_scored_by_one_of_its_ranks(count, dp_size, sp_size):
    layout = Layout(dp_size * sp_size, sp_size)
    scored = []
    for dp_rank in range(dp_size):
        ranks = range(dp_rank * sp_size, (dp_rank + 1) * sp_size)
        sampled = {layout.share_to_sample(count, rank) for rank in ranks}
        assert len(sampled) == 1 and len(own := sampled.pop()) <= layout.most_to_sample(count)
        for rank in ranks:
            part = layout.share_to_score(len(own), rank)
            assert len(part) <= largest_share(len(own), layout.sp_size)
            scored += own[part.start : part.stop]
    assert scored == list(range(count)) and layout.most_to_sample(count) * dp_size < count + dp_size


def test_a_mesh_is_one_ranks_view_of_the_layout_and_one_process_needs_no_group():
    mesh = Mesh(5, Layout(8, sp_size=2))
    assert (mesh.layout.sp_size, mesh.sp_rank, mesh.dp_rank) == (2, 1, 2)
    assert Mesh().is_main and not mesh.is_main and build_mesh() == Mesh() and build_mesh().sp_group is None
    with pytest.raises(ValueError, match="world size 1 is not divisible by sp_size 2"):
        build_mesh(sp_size=2)


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError])
def test_one_rank_hears_only_itself_its_errors_pass_unchanged_and_tensors_are_whole(kind):
    value, error = {"a": 1}, kind("no")
    (own,) = collectives.gather(value)
    assert own is value and collectives.broadcast_from_main(lambda: value) is value
    collectives.require_same({"eta": 0.5})
    with pytest.raises(kind) as raised, collectives.all_or_none():
        raise error
    assert raised.value is error
    tensor = torch.ones(3)
    parts = (collectives.own_part(tensor, tensor), collectives.as_shard_of(torch.zeros(3), tensor))
    for same in (collectives.local_shard(tensor), collectives.whole(tensor), *parts):
        assert same is tensor
    parameter = torch.nn.Parameter(tensor)
    parameter.grad = torch.ones(3)
    collectives.average_gradients([parameter])
    assert torch.equal(parameter.grad, torch.ones(3))


def test_a_shard_in_host_memory_stays_there_though_its_mesh_is_of_gpus():
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        meta = TensorMeta(torch.Size([3]), (1,), torch.float32)
        sharded = DTensor(torch.ones(3), DTensorSpec(DeviceMesh("cuda", [0]), (Shard(0),), meta), requires_grad=False)
        copy = torch.zeros(3)
        found = collectives.as_shard_of(sharded, copy)
        assert (found.device_mesh, found.placements) == (sharded.device_mesh, sharded.placements)
        assert collectives.local_shard(found).data_ptr() == copy.data_ptr()
    finally:
        dist.destroy_process_group()


def test_gpus_are_found_by_what_is_typed_or_the_driver_calls_them_and_an_unknown_or_ambiguous_one_is_refused():
    names = {"h100": "H100-80GB", "H100-80GB": "H100-80GB", "A800-80gb": "A800-80GB", "h100 pcie": "H100 PCIe-80GB"}
    names |= {"A100 40GB": "A100-40GB", "rtx-5090": "RTX 5090-32GB"}
    assert {typed: find_gpu(typed).name for typed in names} == names
    with pytest.raises(ValueError, match="no GPUs .* A100-40GB, .* H200-141GB.* Of another give --gpu_memory and"):
        find_gpu("H1000", memory=48)
    assert find_gpu("H1000", memory=48, teraflops=300) == Gpu("H1000", 48, 300, SLOW_LINK)
    assert find_gpu("h100", memory=60).memory == 60 and find_gpu("h100", memory=60).teraflops == 989
    with pytest.raises(ValueError, match=r"2 GPUs .* of A100-40GB, A100-80GB\."):
        find_gpu("a100")
    for line in DRIVER.split(";"):
        name, _, expected = line.strip().partition(": ")
        found = named_by_driver(name)
        assert f"{found.name.partition('-')[0]} {found.teraflops:g}" == expected
    assert named_by_driver("NVIDIA GeForce RTX 4080") is None


DRIVER = """NVIDIA H200: H200 989; NVIDIA H20: H20 148; NVIDIA H100 80GB HBM3: H100 989; NVIDIA H100 NVL: H100 NVL 835;
NVIDIA H100 PCIe: H100 PCIe 756; NVIDIA A100-SXM4-80GB: A100 312; NVIDIA GeForce RTX 4090: RTX 4090 165;
NVIDIA GeForce RTX 5090: RTX 5090 209; NVIDIA L4: L4 121; NVIDIA L40S: L40S 362; NVIDIA RTX A6000: A6000 155;
NVIDIA GH200 480GB: GH200 989; AMD Instinct MI300X: MI300X 1307"""
