"""The matrix peak of a device that no data sheet names is measured."""

import torch

from hyvideo.observability.matrix_peak import matrix_peak_tflops


def test_a_cpu_is_measured_and_the_runs_generator_left_alone():
    state = torch.get_rng_state()
    assert matrix_peak_tflops(torch.device("cpu"), torch.float32) > 0
    assert torch.equal(torch.get_rng_state(), state)
