"""A rank that does not come ends every group's collective after `collective_timeout`, not only that of all ranks."""

import time

import torch
import torch.distributed as dist

from hyvideo.checkpoint.train_state import _group_of_writers
from hyvideo.distributed.mesh import build_mesh
from tests.support.ranks import run_on_ranks

TIMEOUT = 2


def seconds_until_given_up() -> dict[str, float]:
    """Sum over this rank's group of each axis, to which the last rank does not come; return how long that took."""
    sp = build_mesh(sp_size=2, collective_timeout=TIMEOUT)
    replicate = build_mesh(dp_replicate=2, collective_timeout=TIMEOUT)
    groups = {
        "sp": sp.sp_group,
        "replicate": replicate.weights["replicate"].get_group(),
        "writers": _group_of_writers(TIMEOUT),
    }
    last, waited = sp.world_size - 1, {}
    for axis, group in groups.items():
        dist.barrier()
        started = time.monotonic()
        try:
            if sp.rank != last:
                dist.all_reduce(torch.ones(1), group=group)
                assert last not in dist.get_process_group_ranks(group)
        except RuntimeError:
            waited[axis] = time.monotonic() - started
    dist.barrier()
    return waited


def test_a_missing_rank_is_waited_for_as_long_as_is_configured():
    ranks = run_on_ranks(4, seconds_until_given_up)
    assert [sorted(waited) for waited in ranks] == [["writers"], ["replicate", "writers"], ["sp", "writers"], []]
    assert all(TIMEOUT / 2 < seconds < 3 * TIMEOUT for waited in ranks for seconds in waited.values())
