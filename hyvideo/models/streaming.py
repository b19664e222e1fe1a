"""Fill a network that has no memory yet from files, tensor by tensor: strict, and with one copy of the weights.

Peak memory is the weights in their dtype plus what is read at a time. A sharded network (FSDP2) is filled by each rank
for itself: it reads the rows of its own shards and nothing else.
"""

from collections.abc import Sequence

import torch
from accelerate.utils import set_module_tensor_to_device
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hyvideo.models.conversion import Naming, Part
from hyvideo.models.weight_files import WeightSource

LISTED = 100
"""Most faulty keys of one kind that a message lists."""


def fill(
    module: nn.Module,
    source: WeightSource,
    naming: Naming,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    ignored: Sequence[str] = (),
) -> None:
    """Give every tensor of `module`'s state dict its value from `source`; nothing is read before all fit.

    Args:
        module: on the meta device (`accelerate.init_empty_weights`); or a network with weights, whole or sharded with
            FSDP2, which are overwritten.
        source: the files.
        naming: where the source keeps the tensor of a given name; None: it does not, and the tensor stays as it is.
        dtype: dtype of weights that have no memory yet; None keeps that of the files.
        device: where these get memory, tensor by tensor; None: in host memory. Buffers stay where they are.
        ignored: prefixes of names that may be left over in the source.

    Raises:
        ValueError: missing, unexpected or mis-shaped tensors; the message lists them by the source's own names.
    """
    check_fit(module, source, naming, ignored)
    parts = _parts(module, naming)
    order = {name: position for position, name in enumerate(source.shapes)}
    for name, part in sorted(parts.items(), key=lambda item: order[item[1].name]):
        _fill_one(module, name, part, source, dtype, device or torch.device("cpu"))


@torch.no_grad()
def _fill_one(
    module: nn.Module, name: str, part: Part, source: WeightSource, dtype: torch.dtype | None, device: torch.device
) -> None:
    """Allocate one tensor where that is still to be done and read it, or this rank's rows of it."""
    parameter = module.get_parameter(name)
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        if local.numel():
            local.copy_(source.read(part.name, part.rows(offset[0], offset[0] + local.shape[0], parameter.shape[0])))
        return
    whole = part == Part(part.name)
    stored = source.read(part.name, None if whole else part.rows(0, parameter.shape[0], parameter.shape[0]))
    if not parameter.is_meta:
        parameter.copy_(stored)
        return
    value = torch.empty(parameter.shape, dtype=dtype or stored.dtype, device=device).copy_(stored)
    set_module_tensor_to_device(module, name, device, value=value, dtype=value.dtype)


def check_fit(module: nn.Module, source: WeightSource, naming: Naming, ignored: Sequence[str] = ()) -> None:
    """Raise a ValueError unless `source` holds exactly the tensors of `module`; arguments and error as in `fill`."""
    parts = _parts(module, naming)
    wanted = {part.name: part.shape(module.get_parameter(name).shape) for name, part in parts.items()}
    held = source.shapes
    faults = {
        "missing keys": sorted(set(wanted) - set(held)),
        "unexpected keys": sorted(n for n in set(held) - set(wanted) if not n.startswith(tuple(ignored))),
        "mis-shaped keys": [
            f"{name} (expected {list(wanted[name])}, received {list(held[name])})"
            for name in sorted(set(wanted) & set(held))
            if wanted[name] != held[name]
        ],
    }
    listed = []
    for kind, names in faults.items():
        rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        listed += [f"{kind}: {', '.join(names[:LISTED])}{rest}"] if names else []
    if listed:
        raise ValueError(
            f"The weights in '{source.where}' do not fit {source.fits}. {'; '.join(listed)}. {source.advice}"
        )


def _parts(module: nn.Module, naming: Naming) -> dict[str, Part]:
    return {name: part for name in module.state_dict() if (part := naming(name)) is not None}
