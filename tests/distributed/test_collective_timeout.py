"""A rank that does not come ends every group's collective after `collective_timeout`, not only that of all ranks."""

import time

import pytest
import torch
import torch.distributed as dist

from hyvideo.checkpoint.train_state import _group_of_writers
from hyvideo.distributed.mesh import build_mesh
from tests.support.ranks import run_on_ranks

TIMEOUT = 2


def seconds_until_given_up(axis: str, axes: dict[str, int]) -> float | None:
    """Sum over this rank's group of an axis, to which the last rank does not come; return how long that took."""
    mesh = build_mesh(**axes, collective_timeout=TIMEOUT)
    if axis == "writers":
        group = _group_of_writers(TIMEOUT)
    else:
        group = mesh.sp_group if axis == "sp" else mesh.weights[axis].get_group()
    members = dist.get_process_group_ranks(group)
    dist.barrier()
    if mesh.rank == mesh.world_size - 1:
        time.sleep(4 * TIMEOUT)
        return None
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)
        assert mesh.world_size - 1 not in members
        return None
    except RuntimeError:
        return time.monotonic() - started


@pytest.mark.parametrize(
    ("axis", "axes", "waiting"), [("sp", {"sp_size": 2}, 1), ("replicate", {"dp_replicate": 2}, 1), ("writers", {}, 3)]
)
def test_a_missing_rank_is_waited_for_as_long_as_is_configured(axis: str, axes: dict[str, int], waiting: int):
    waited = [seconds for seconds in run_on_ranks(4, seconds_until_given_up, axis, axes) if seconds is not None]
    assert len(waited) == waiting
    assert TIMEOUT / 2 < max(waited) < 3 * TIMEOUT
