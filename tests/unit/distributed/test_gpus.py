"""GPUs are found by the name a user types and by the one the driver gives."""

import pytest

from hyvideo.distributed.gpus import find_gpu, named_by_driver


@pytest.mark.parametrize(
    ("typed", "name"),
    [("h100", "H100-80GB"), ("H100-80GB", "H100-80GB"), ("A800-80gb", "A800-80GB"), ("h100 pcie", "H100 PCIe-80GB")],
)
def test_gpus_are_found_by_what_is_typed(typed, name):
    assert find_gpu(typed).name == name


@pytest.mark.parametrize(
    ("typed", "answer"),
    [("H1000", "no GPUs .* A100-40GB, .* H200-141GB"), ("a100", r"2 GPUs .* of A100-40GB, A100-80GB\.")],
)
def test_an_unknown_or_ambiguous_gpu_is_refused_with_what_it_may_be(typed, answer):
    with pytest.raises(ValueError, match=answer):
        find_gpu(typed)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", ("H200", 989)),
        ("NVIDIA H20", ("H20", 148)),
        ("NVIDIA H100 80GB HBM3", ("H100", 989)),
        ("NVIDIA H100 NVL", ("H100 NVL", 835)),
        ("NVIDIA H100 PCIe", ("H100 PCIe", 756)),
        ("NVIDIA A100-SXM4-80GB", ("A100", 312)),
        ("NVIDIA GeForce RTX 4090", ("RTX 4090", 165)),
        ("NVIDIA GeForce RTX 4080", None),
    ],
)
def test_gpus_are_known_by_what_the_driver_calls_them(name, expected):
    found = named_by_driver(name)
    assert (found and (found.name.partition("-")[0], found.teraflops)) == expected
