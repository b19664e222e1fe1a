"""How many operations a device can make in matrix products: the measure of how well it is used."""

import re
import time

import torch

DATA_SHEET_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}
"""GPU -> 10^12 bf16 or fp16 operations per second of its tensor cores, without sparsity, by its maker's data sheet."""


def matrix_peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the 10^12 operations per second that `device` can make in matrix products of `dtype`.

    That is the data sheet's figure of a known GPU in half precision, otherwise what a large product reaches now.
    """
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        known = data_sheet_tflops(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    return measured_matrix_tflops(device, dtype)


def data_sheet_tflops(device_name: str) -> float | None:
    """Look a GPU up by the name its driver gives, such as `NVIDIA H100 80GB HBM3`; None when it is not known."""
    words = set(re.split(r"[\s-]+", device_name.lower()))
    matching = [name for name in DATA_SHEET_TFLOPS if words.issuperset(name.lower().split())]
    return DATA_SHEET_TFLOPS[max(matching, key=len)] if matching else None


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
