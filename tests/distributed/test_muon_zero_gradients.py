"""A sharded matrix is moved by Muon when any rank's part of its gradient is not zero, and rests when all are."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hyvideo.algorithms.optimizer import Muon
from hyvideo.distributed.collectives import whole
from tests.support.ranks import run_on_ranks

ROWS = 3
"""Over two ranks: two rows and one."""


def moves(num_ranks: int) -> list[list[list[float]]]:
    """Take a step of a whole gradient, one whose gradient is zero but in the first row, and one of zeros."""
    start = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
    gradients = [torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    gradients[1][1:] = 0
    gradients[2].zero_()
    mesh = init_device_mesh("cpu", (num_ranks,)) if num_ranks > 1 else None

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        """Shard a tensor over the ranks, if there are several."""
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    parameter = nn.Parameter(placed(start.clone()))
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.0)
    moved = []
    for gradient in gradients:
        before = whole(parameter.detach()).clone()
        parameter.grad = placed(gradient)
        optimizer.step()
        moved.append((whole(parameter.detach()) - before).tolist())
    return moved


def test_two_ranks_move_and_rest_as_one_does():
    expected = torch.tensor(moves(1))
    assert (expected[1] != 0).all()  # rows without a gradient of their own have momentum
    assert not expected[2].any()
    for received in run_on_ranks(2, moves, 2):
        torch.testing.assert_close(torch.tensor(received), expected, rtol=1e-5, atol=1e-6)
