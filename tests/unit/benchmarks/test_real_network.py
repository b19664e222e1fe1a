"""The GPU benchmark runs as it is on a small network on a CPU; what it measures there means nothing."""

import pytest

from benchmarks import real_network
from benchmarks.network import SMALL
from benchmarks.real_network import Case, measure


def test_every_line_of_the_gpu_benchmark_can_be_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(real_network, "measured_matrix_tflops", lambda *_: 2.0)
    monkeypatch.setattr(real_network, "compile_blocks", lambda transformer: None)  # needs minutes
    results = measure((Case("small", (2, 4, 4), (9,)), Case("small_guided", (2, 4, 4), (9, 3))), **SMALL)
    names = [result.name for result in results]
    assert len(set(names)) == len(names) == 2 * 4 * 2 + 2 * 2
    for result in results:
        if result.name.endswith("against_stock"):
            assert result.ratio.pairs == 5
        else:
            facts = result.facts
            assert facts["mfu_of_measured_peak"] == facts["tflops"] / 2.0 > 0
            assert facts["peak_gb_beyond_weights"] > 0
    one, two = (
        next(result.facts for result in results if result.name == f"real_network/{name}/forward_full")
        for name in ("small", "small_guided")
    )
    assert two["tflops"] * two["seconds"] > 1.5 * one["tflops"] * one["seconds"]  # two rows
