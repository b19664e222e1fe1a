"""Who is where: the axes over ranks, and where the videos of a round lie."""

import pytest
import torch

from hyvideo.data.samplers import Assignment, GroupSampler
from hyvideo.distributed.mesh import Mesh, RoundLayout, build_mesh


def test_the_drawing_of_the_mesh_is_true():
    meshes = [Mesh(rank=rank, world_size=8, sp_size=2, dp_replicate=2) for rank in range(8)]
    assert [mesh.sp_rank for mesh in meshes] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [mesh.dp_rank for mesh in meshes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (meshes[0].dp_size, meshes[0].dp_shard) == (4, 2)
    assert all(mesh.rank in mesh.ranks_of(mesh.dp_rank) for mesh in meshes)
    assert [mesh.is_main for mesh in meshes] == [True, *[False] * 7]


def test_one_process_needs_no_group():
    assert build_mesh() == Mesh()
    assert build_mesh().sp_group is None


@pytest.mark.parametrize("axes", [{"sp_size": 2}, {"dp_replicate": 3}, {"sp_size": 0}])
def test_axes_that_do_not_divide_the_ranks_are_refused(axes: dict[str, int]):
    with pytest.raises(ValueError, match=r"world size 1 must be a multiple of sp_size \d x dp_replicate \d"):
        build_mesh(**axes)


@pytest.mark.parametrize("num_rollouts", [1, 2])
@pytest.mark.parametrize(("batch_size", "dp_size"), [(4, 1), (1, 4), (2, 4), (4, 3), (8, 2)])
def test_in_round_order_the_videos_are_those_of_one_rank_and_groups_are_contiguous(
    batch_size: int, dp_size: int, num_rollouts: int
):
    def assignments(size: int, rank: int, ranks: int) -> list[Assignment]:
        return GroupSampler(5, size, 4, rank, ranks, seed=3).next_round(num_rollouts)

    layout = RoundLayout(batch_size, dp_size, num_rollouts)
    parts = [assignments(batch_size, rank, dp_size) for rank in range(dp_size)]
    tensors = [torch.tensor([(a.prompt_index, a.generation) for a in part]) for part in parts]
    joined = layout.in_round_order(tensors)
    alone = assignments(batch_size * dp_size, 0, 1)
    assert [Assignment(*pair) for pair in joined.tolist()] == alone
    assert (joined[:, 0].reshape(-1, 4) == joined[::4, :1]).all()
    for rank, part in enumerate(tensors):
        assert torch.equal(joined[layout.positions(rank)], part)
