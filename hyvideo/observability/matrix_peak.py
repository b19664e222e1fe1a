"""How many operations a device can make in matrix products: the measure of how well it is used."""

import time

import torch

from hyvideo.distributed.gpus import named_by_driver


def matrix_peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the 10^12 operations per second that `device` can make in matrix products of `dtype`.

    That is the data sheet's figure of a known GPU in half precision, otherwise what a large product reaches now.
    """
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        known = named_by_driver(torch.cuda.get_device_name(device))
        if known is not None:
            return known.teraflops
    return measured_matrix_tflops(device, dtype)


def measured_matrix_tflops(device: torch.device, dtype: torch.dtype, *, size: int | None = None) -> float:
    """Time products of two `size` x `size` matrices: the fastest of five counts, after one that is not timed.

    Args:
        device: CPU or GPU.
        dtype: of the matrices.
        size: None: 8192 on a GPU, 1024 on a CPU.
    """
    size = size or (8192 if device.type == "cuda" else 1024)
    generator = torch.Generator(device).manual_seed(0)  # not the global one, whose state is the run's
    first, second = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(6):
        start = _now(device)
        first @ second
        seconds.append(_now(device) - start)
    return 2 * size**3 / min(seconds[1:]) / 1e12


def _now(device: torch.device) -> float:
    """Return the clock when `device` has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
