"""The matrix peak of a device: known by its name, otherwise measured."""

import pytest
import torch

from hyvideo.observability.matrix_peak import data_sheet_tflops, matrix_peak_tflops, measured_matrix_tflops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce RTX 4090", 165.0),
        ("NVIDIA GeForce RTX 4080", None),
    ],
)
def test_a_gpu_is_known_by_the_words_of_its_name(name, tflops):
    assert data_sheet_tflops(name) == tflops


def test_a_cpu_is_measured_and_the_runs_generator_left_alone():
    state = torch.get_rng_state()
    assert 1e-4 < matrix_peak_tflops(torch.device("cpu"), torch.float32) < 100
    assert torch.equal(torch.get_rng_state(), state)


def test_a_larger_product_takes_longer_at_about_the_same_rate():
    small, large = (measured_matrix_tflops(torch.device("cpu"), torch.float32, size=size) for size in (256, 512))
    assert 0.05 < small / large < 20
