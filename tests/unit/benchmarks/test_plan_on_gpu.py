"""The comparison of a plan with a GPU, tried out on a CPU with a small network."""

import json
from pathlib import Path

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import plan_on_gpu


def test_predicted_operations_are_those_of_the_update(tiny_root: Path, capsys: pytest.CaptureFixture):
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch does not count those of the CPU's fused attention
        plan_on_gpu.main(["--model", str(tiny_root), "--frames", "9", "--size", "64x64", "--num_layers", "4"])
    said = json.loads(capsys.readouterr().out)
    assert said["layers"] == 4
    assert abs(said["measured/predicted - 1"]["flops"]) < 0.2  # of so small a network much is not recomputed
    assert all(-0.5 < said["measured/predicted - 1"][name] < 1 for name in ("backward", "optimizer"))
    assert said["measured"]["seconds"] > 0
