"""The matrix peak of a device that no data sheet names is measured."""

import timeit

import torch

from hyvideo.observability.matrix_peak import matrix_peak_tflops


def test_the_peak_is_about_what_a_large_product_reaches_and_measuring_leaves_the_runs_generator_alone():
    matrix = torch.randn(1024, 1024)
    reached = 2 * 1024**3 / min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=10)) / 1e12
    state = torch.get_rng_state()
    assert reached / 5 < matrix_peak_tflops(torch.device("cpu"), torch.float32) < reached * 5
    assert torch.equal(torch.get_rng_state(), state)
