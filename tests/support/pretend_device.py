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

READS = {"_local_scalar_dense", "equal", "is_nonzero"}
"""Operations that hand a value to Python: the host waits for the device."""

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
    """Counts, while active, copies and bytes in either direction and the values that Python reads.

    Attributes:
        copies: by direction, `to_device`, `to_host` and `reads`.
        bytes: likewise, without reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._literals = _Literals()

    def __enter__(self) -> "Transfers":
        self._literals.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._literals.__exit__(*error)

    def clear(self) -> None:
        """Begin to count again."""
        self.copies.clear()
        self.bytes.clear()

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        source = next((arg for arg in args if isinstance(arg, Tensor)), None)
        target = kwargs.get("device")
        if operation is _aten._to_copy.default and target is not None:
            return self._move(source, args, kwargs)
        if operation is _aten.copy_.default and isinstance(args[0], Elsewhere) != isinstance(args[1], Elsewhere):
            return self._copy(*args[:2])
        if isinstance(source, Elsewhere):
            if operation.overloadpacket.__name__ in READS:
                self.copies["reads"] += 1
                return operation(*tree_map_only(Elsewhere, lambda tensor: tensor.inner, args), **kwargs)
        elif target is not None and torch.device(target) == ELSEWHERE and source is None:
            return Elsewhere(operation(*args, **{**kwargs, "device": torch.device("cpu")}))
        return operation(*args, **kwargs)

    def _move(self, source: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Copy a tensor to the other side, or change its dtype on its own."""
        to_device = torch.device(kwargs.pop("device")) == ELSEWHERE
        here = isinstance(source, Elsewhere)
        kwargs.pop("non_blocking", None)
        inner = _aten._to_copy.default(source.inner if here else source, **kwargs)
        if to_device != here:
            self._count("to_device" if to_device else "to_host", source.nbytes)
        return Elsewhere(inner) if to_device else inner

    def _copy(self, target: Tensor, source: Tensor) -> Tensor:
        """Copy into a tensor on the other side."""
        to_device = isinstance(target, Elsewhere)
        self._count("to_device" if to_device else "to_host", source.nbytes)
        inner_target, inner_source = (part.inner if isinstance(part, Elsewhere) else part for part in (target, source))
        inner_target.copy_(inner_source)
        return target

    def _count(self, direction: str, num_bytes: int) -> None:
        self.copies[direction] += 1
        self.bytes[direction] += num_bytes


def move_elsewhere(module: nn.Module) -> None:
    """Move a network's weights and buffers, in place; nothing is counted."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(Elsewhere(parameter.detach()), requires_grad=parameter.requires_grad))
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = Elsewhere(buffer)
