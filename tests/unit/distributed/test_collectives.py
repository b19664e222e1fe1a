"""Without a process group there is one rank: values, errors and decisions are its own."""

import pytest
import torch

from hyvideo.distributed.collectives import (
    all_or_none,
    as_shard_of,
    average_gradients,
    from_main,
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
    assert from_main(lambda: value) is value
    require_same({"eta": 0.5})


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError])
def test_its_errors_pass_unchanged(kind: type[Exception]):
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
