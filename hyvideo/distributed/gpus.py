"""GPUs and the numbers of their data sheets, from which plans and utilisation are worked out."""

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Gpu:
    """What a data sheet says of a GPU."""

    name: str
    memory: float  # GiB that a process can allocate
    teraflops: float  # dense bf16 or fp16 matrix products, 1e12 operations per second
    link: float  # GB/s that it sends to a GPU of the same machine


GPUS = (
    Gpu("A100-40GB", 39, 312, 300),
    Gpu("A100-80GB", 79, 312, 300),
    Gpu("A800-80GB", 79, 312, 200),
    Gpu("H100-80GB", 79, 989, 450),
    Gpu("H100 NVL-94GB", 93, 835, 300),
    Gpu("H100 PCIe-80GB", 79, 756, 64),
    Gpu("H800-80GB", 79, 989, 200),
    Gpu("H20-96GB", 95, 148, 450),
    Gpu("H200-141GB", 139, 989, 450),
    Gpu("GH200-96GB", 95, 989, 450),
    Gpu("B200-180GB", 178, 2250, 900),
    Gpu("MI300X-192GB", 191, 1307, 448),
    Gpu("L40S-48GB", 44, 362, 32),
    Gpu("A6000-48GB", 47, 155, 32),
    Gpu("L4-24GB", 22, 121, 32),
    Gpu("RTX 5090-32GB", 31, 209, 64),
    Gpu("RTX 4090-24GB", 23, 165, 32),
)
"""Only an H200's speed was measured, and it is the one that a plan's share of the peak is from."""


SLOW_LINK = 32.0
"""GB/s of PCIe 4, assumed of a GPU that is not listed."""


def find_gpu(name: str, **given: float) -> Gpu:
    """Return the GPU called `name`, whatever its case and blanks; its memory may be left out if one GPU remains.

    What is `given` of it (memory, teraflops) replaces the data sheet's. Of a GPU that is not listed both must be given;
    otherwise a ValueError lists all that it may be.
    """
    typed = name.lower().replace(" ", "-")
    found = [gpu for gpu in GPUS if typed in (known.lower().replace(" ", "-") for known in (gpu.name, _model(gpu)))]
    if not found and len(given) == 2:
        return Gpu(name, link=SLOW_LINK, **given)
    if len(found) != 1:
        names = ", ".join(gpu.name for gpu in found or GPUS)
        other = "" if found else " Of another give --gpu_memory and --gpu_tflops."
        raise ValueError(f"--gpu: {len(found) or 'no'} GPUs are known as '{name}'; expected one of {names}.{other}")
    return replace(found[0], **given)


def this_gpu() -> Gpu | None:
    """Return this process's GPU with the memory it really has, its speed 0 where it is not listed; None without one."""
    import torch  # here, so that the others answer without waiting for it

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory = round(found.total_memory / 2**30, 1)
    return replace(named_by_driver(found.name) or Gpu(found.name, memory, 0, 0), name=found.name, memory=memory)


def named_by_driver(name: str) -> Gpu | None:
    """Return the GPU that the driver calls `name`, such as `NVIDIA H100 80GB HBM3`; None where it is not listed."""
    words = set(re.split(r"[\s-]+", name.lower()))
    matching = [gpu for gpu in GPUS if words.issuperset(_model(gpu).split())]
    return max(matching, key=lambda gpu: len(_model(gpu)), default=None)


def _model(gpu: Gpu) -> str:
    """Return a GPU's name in lower case without its memory."""
    return gpu.name.lower().partition("-")[0]
