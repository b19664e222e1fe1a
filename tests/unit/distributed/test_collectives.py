"""Without a process group there is one rank: values, errors and decisions are its own."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hyvideo.distributed.collectives import (
    all_or_none,
    as_shard_of,
    average_gradients,
    broadcast_from_main,
    gather,
    local_shard,
    own_part,
    require_same,
    whole,
)


def test_one_rank_hears_only_itself():
    value = {"a": 1}
    assert gather(value) == [value]
    assert gather(value)[0] is value
    assert broadcast_from_main(lambda: value) is value
    require_same({"eta": 0.5})


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError])
def test_its_errors_pass_unchanged(kind):
    error = kind("no")
    with pytest.raises(kind) as raised, all_or_none():
        raise error
    assert raised.value is error


def test_tensors_are_whole():
    tensor = torch.ones(3)
    for same in (local_shard(tensor), whole(tensor), own_part(tensor, tensor), as_shard_of(torch.zeros(3), tensor)):
        assert same is tensor
    parameter = torch.nn.Parameter(tensor)
    parameter.grad = torch.ones(3)
    average_gradients([parameter])
    assert torch.equal(parameter.grad, torch.ones(3))


def test_a_shard_in_host_memory_stays_there_though_its_mesh_is_of_gpus():
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        meta = TensorMeta(torch.Size([3]), (1,), torch.float32)
        sharded = DTensor(torch.ones(3), DTensorSpec(DeviceMesh("cuda", [0]), (Shard(0),), meta), requires_grad=False)
        copy = torch.zeros(3)
        found = as_shard_of(sharded, copy)
        assert (found.device_mesh, found.placements) == (sharded.device_mesh, sharded.placements)
        assert local_shard(found).data_ptr() == copy.data_ptr()
    finally:
        dist.destroy_process_group()
