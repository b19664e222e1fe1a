"""One process is a mesh of its own, and ranks that do not divide into the axes are refused."""

import pytest

from hyvideo.distributed.layout import Layout
from hyvideo.distributed.mesh import Mesh, build_mesh


def test_a_mesh_is_one_ranks_view_of_the_layout():
    mesh = Mesh(5, Layout(8, sp_size=2))
    assert (mesh.world_size, mesh.sp_size, mesh.dp_size, mesh.sp_rank, mesh.dp_rank) == (8, 2, 4, 1, 2)
    assert Mesh().is_main and not mesh.is_main


def test_one_process_needs_no_group():
    assert build_mesh() == Mesh()
    assert build_mesh().sp_group is None


@pytest.mark.parametrize("axes", [{"sp_size": 2}, {"dp_replicate": 3}, {"sp_size": 0}])
def test_axes_that_do_not_divide_the_ranks_are_refused(axes: dict[str, int]):
    ((name, value),) = axes.items()
    with pytest.raises(ValueError, match=rf"(by {name} {value}: set|{name} must be at least 1; received {value})"):
        build_mesh(**axes)
