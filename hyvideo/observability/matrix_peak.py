"""The most operations per second that a device makes in matrix products: what the use of it is compared with."""

import torch

from hyvideo.distributed.gpus import named_by_driver
from hyvideo.observability.phase_timer import clock


def matrix_peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the 10^12 operations per second that `device` can make in matrix products of `dtype`.

    That is the data sheet's figure of a known GPU in half precision, otherwise what a large product reaches now.
    """
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        known = named_by_driver(torch.cuda.get_device_name(device))
        if known is not None:
            return known.teraflops
    return measured_matrix_tflops(device, dtype)


def measured_matrix_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Time products of two matrices of `dtype`: the fastest of five counts, after one that is not timed."""
    size = 8192 if device.type == "cuda" else 1024
    generator = torch.Generator(device).manual_seed(0)  # not the global one, whose state is the run's
    first, second = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(6):
        start = clock(device)
        first @ second
        seconds.append(clock(device) - start)
    return 2 * size**3 / min(seconds[1:]) / 1e12
