"""A device that is none: tensors say they are elsewhere, compute on the CPU, and every transfer is counted.

What a GPU run copies between host and device, and where it waits for the device, is thereby known without a GPU.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

ELSEWHERE = torch.device("meta")
"""The name it goes by: the one device type that needs no driver. Its tensors have values all the same."""

READS = {"_local_scalar_dense", "equal", "nonzero"}
"""Operations whose result decides what the host does next: it waits for the device. So does indexing with a mask."""

_aten = torch.ops.aten


class Elsewhere(Tensor):
    """A tensor on the pretended device; `inner` holds its values on the CPU."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Elsewhere":
        return Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=ELSEWHERE,
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self, **kwargs: Any) -> str:
        return f"Elsewhere({self.inner!r})"

    def tolist(self) -> list:
        """Copy to the host, as on a real device."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute on the CPU; the result is elsewhere again."""
        kwargs = dict(kwargs or {})
        plain = tree_map_only(Elsewhere, lambda tensor: tensor.inner, (args, kwargs))
        if "device" in plain[1]:
            plain[1]["device"] = torch.device("cpu")
        result = operation(*plain[0], **plain[1])
        wrapped = tree_map_only(Tensor, lambda tensor: Elsewhere(tensor), result)
        return return_and_correct_aliasing(operation, args, kwargs, wrapped)


class _Literals(TorchFunctionMode):
    """Lets `torch.tensor(list, device=...)` copy from the host, as on a real device."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.tensor and kwargs.get("device") == ELSEWHERE:
            del kwargs["device"]
            return function(*args, **kwargs).to(ELSEWHERE)
        return function(*args, **kwargs)


class Transfers(TorchDispatchMode):
    """Counts, while active, what is copied in either direction, and how often the host waits for a value.

    Attributes:
        to_device: shape of what was copied -> how often.
        to_host: likewise.
        bytes: of all copies, by direction.
        reads: waits of the host for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._literals = _Literals()
        self.to_device: Counter[tuple[int, ...]] = Counter()
        self.to_host: Counter[tuple[int, ...]] = Counter()
        self.bytes: Counter[str] = Counter()
        self.reads = 0

    def __enter__(self) -> "Transfers":
        self._literals.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._literals.__exit__(*error)

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        source = next((arg for arg in args if isinstance(arg, Tensor)), None)
        target = kwargs.get("device")
        if operation is _aten._to_copy.default and target is not None:
            return self._move(source, kwargs)
        if operation is _aten.copy_.default and isinstance(args[0], Elsewhere) != isinstance(args[1], Elsewhere):
            return self._copy(*args[:2])
        if isinstance(source, Elsewhere):
            name = operation.overloadpacket.__name__
            self.reads += (
                name in READS
                or name == "index"
                and any(index is not None and index.dtype == torch.bool for index in args[1])
            )
            if name == "_local_scalar_dense":
                return source.inner.item()
            if target is not None and torch.device(target) != ELSEWHERE:  # a new tensor here, like one there
                return operation(*tree_map_only(Elsewhere, lambda tensor: tensor.inner, args), **kwargs)
        elif target is not None and torch.device(target) == ELSEWHERE and source is None:
            return Elsewhere(operation(*args, **{**kwargs, "device": torch.device("cpu")}))
        return operation(*args, **kwargs)

    def _move(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Copy a tensor to the other side, or change its dtype on its own."""
        to_device = torch.device(kwargs.pop("device")) == ELSEWHERE
        here = isinstance(source, Elsewhere)
        kwargs.pop("non_blocking", None)
        inner = _aten._to_copy.default(source.inner if here else source, **kwargs)
        if to_device != here:
            self._count(source, to_device)
        return Elsewhere(inner) if to_device else inner

    def _copy(self, target: Tensor, source: Tensor) -> Tensor:
        """Copy into a tensor on the other side."""
        self._count(source, isinstance(target, Elsewhere))
        inner_target, inner_source = (part.inner if isinstance(part, Elsewhere) else part for part in (target, source))
        inner_target.copy_(inner_source)
        return target

    def _count(self, source: Tensor, to_device: bool) -> None:
        (self.to_device if to_device else self.to_host)[tuple(source.shape)] += 1
        self.bytes["to_device" if to_device else "to_host"] += source.nbytes


def move_elsewhere(module: nn.Module) -> None:
    """Move a network's weights and buffers, in place; nothing is counted."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(Elsewhere(parameter.detach()), requires_grad=parameter.requires_grad))
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = Elsewhere(buffer)
