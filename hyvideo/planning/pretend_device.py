"""A GPU that does not exist: tensors on it have shapes and types but no values, and every fault against it is noted.

Unlike PyTorch's `meta` device it behaves as CUDA does. The code takes its GPU branches (autocast, streams, sharding in
bf16), a host tensor that meets a device tensor is an error, and reading a value back is seen, where CUDA would silently
wait. Host tensors stay real as long as they are small, so that what the host decides is decided as in a run.
"""

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.flop_counter import flop_registry

from hyvideo.data import host_reads
from hyvideo.data.host_reads import REASONS
from hyvideo.planning.peak_memory import PeakMemory

NAME = "pretend"

SMALL = 2**20
"""Elements up to which a host tensor is real; a larger one has no values either."""

MATRIX_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution")

_aten = torch.ops.aten
INDEXED = (_aten.index, _aten._unsafe_index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
"""Operations that copy host indices, and one host value, to the device by themselves."""

_BY_PLACE = ("sent", "reads", "uploads", "pinned", "mixes", "faults", "kernels")
"""Attributes of a `PretendDevice` that count by a phase and more."""

_PROJECT = Path(__file__).parents[2]
_WAYS = (__file__, host_reads.__file__)


class PretendDevice(PeakMemory):
    """Inside the `with` block `torch.device("pretend")` exists; what happens on it is counted by phase.

    Attributes:
        device: to put tensors on.
        phase: name that what happens now is counted under.
        peaks: the most by phase.
        reads: how often a value was read back, by (phase, reason), or (phase, place) where no reason was given.
        uploads: how often the host waited for the device to copy something to it, also host indices, likewise.
        pinned: how often it copied something from pinned memory, for which the host does not wait, likewise.
        reasons: reasons that were given (`hyvideo.data.host_reads`).
        mixes: how often a host tensor met a device tensor, by (phase, operation and place).
        faults: other things that a GPU would punish, by (phase, what and where).
        flops: operations by phase.
        sent: bytes that this rank sends, by (phase, kind of collective, name of the group).
        kernels: calls of attention kernels, by (phase, name).
        gathered: bytes in use that other ranks' shards were gathered into, apart from what FSDP frees by itself.
        most_gathered: the most of these.
    """

    def __init__(self) -> None:
        super().__init__()
        self._libraries = register()
        self.device = torch.device(NAME, 0)
        self.phase = "build"
        self.gathered = self.most_gathered = 0
        self.reasons: set[str] = set()
        self.forget()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._results: dict[object, tuple] = {}  # operation and what decides its shapes -> those of its results

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what happens in a `with` block under `phase`."""
        before, self.phase = self.phase, phase
        self._count_peak()
        try:
            yield
        finally:
            self.phase = before

    def forget(self) -> None:
        """Forget what was counted so far; what is in memory stays."""
        for name in ("peaks", "flops", *_BY_PLACE):
            setattr(self, name, Counter())

    def counted(self, phase: str) -> Counter[tuple[str, ...]]:
        """Return what was counted in a phase so far: (name of the attribute, rest of its key) -> number."""
        found: Counter[tuple[str, ...]] = Counter({("flops",): self.flops[phase]})
        for name in _BY_PLACE:
            found |= Counter({(name, *key[1:]): count for key, count in getattr(self, name).items() if key[0] == phase})
        return found

    def __enter__(self) -> "PretendDevice":
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes a host tensor, and a copy that is dispatched
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again as the operations on its shards
        kwargs = dict(kwargs) if kwargs else {}
        if self._paused:
            return operation(*args, **kwargs)
        if operation is torch.ops.prim.device.default:  # asked for before every other operation
            return args[0].fake_device if isinstance(args[0], FakeTensor) else operation(*args)
        if operation in (_aten._pin_memory.default, _aten.pin_memory.default):
            return args[0]
        tensors = _tensors_in(args) + _tensors_in(kwargs.values())
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        on_device = any(_is_on_device(value) for value in tensors) or (
            torch.device(kwargs.get("device") or "cpu").type == NAME
        )
        if (
            not on_device
            and not any(isinstance(value, FakeTensor) for value in tensors)
            and not _is_large(operation, args, kwargs)
        ):
            return operation(*args, **kwargs)
        special = self._special(operation, args, kwargs)
        if special is not NotImplemented:
            return special
        if kwargs.pop("generator", None) is not None and operation is _aten.randn.generator:
            operation = _aten.randn.default
        result = self._run(operation, args, kwargs, tensors)
        if on_device:
            self._note(operation, args, kwargs, result)
            for value in _tensors_in([result]):
                self._see(value)
        return result

    def _run(self, operation: Any, args: tuple, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        """Return an operation's result, for most of them without the slow checks of `FakeTensorMode`."""
        if not all(isinstance(value, FakeTensor) for value in tensors):
            # those that were made outside are taken into the rehearsal
            enter = lambda value: value if isinstance(value, FakeTensor) else self._fake.from_tensor(value)  # noqa: E731
            return self._checked(operation, *tree_map_only(Tensor, enter, (args, kwargs)))
        if operation.is_view or operation is _aten._unsafe_view.default:
            with in_kernel_invocation_manager(self._fake):
                viewed = operation(*args, **kwargs)
            views = [FakeTensor(self._fake, each, tensors[0].fake_device) for each in _tensors_in([viewed])]
            return views[0] if isinstance(viewed, Tensor) else views
        if not all(map(_is_on_device, tensors)):
            return self._checked(operation, args, kwargs)
        key = (operation, _shapes(args), _shapes(kwargs))
        if (made := self._results.get(key)) is not None:
            if not made:  # it writes into its first argument, or into others and returns nothing
                return args[0] if operation._schema.returns else None
            made = [torch.empty_strided(*shape, dtype=dtype, device="meta") for *shape, dtype in made]
            results = [FakeTensor(self._fake, each, self.device) for each in made]
            return results[0] if len(results) == 1 else tuple(results)
        result = self._checked(operation, args, kwargs)
        results = result if isinstance(result, tuple) else (result,)
        if result is None or (args and result is args[0] and torch.Tag.inplace_view not in operation.tags):
            self._results[key] = ()
        elif all(isinstance(each, FakeTensor) and _is_on_device(each) for each in results):
            held = {each.untyped_storage()._cdata for each in tensors}
            if not held & {each.untyped_storage()._cdata for each in results}:
                self._results[key] = _shapes(results)
        return result

    def _checked(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Compute shapes; a mix of host and device is noted, and repaired so that the rehearsal goes on."""
        try:
            with self._fake:
                return operation(*args, **kwargs)
        except DynamicOutputShapeException:
            self.faults[self.phase, f"{operation} needs values to know its size, in {_place()}"] += 1
            raise
        except (FakeTensorDeviceMismatchError, RuntimeError) as error:
            if not isinstance(error, FakeTensorDeviceMismatchError) and "device" not in str(error):
                raise
            self.mixes[self.phase, f"{operation} in {_place()}"] += 1
        with self._fake:
            moved = tree_map_only(Tensor, lambda value: value.to(self.device), (args, kwargs))
            return operation(*moved[0], **moved[1])

    def _special(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Answer what needs values or goes between host and device; NotImplemented for all else."""
        if operation is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        if operation is _aten._local_scalar_dense.default:
            if args[0].device.type == NAME:
                self.reads[self.phase, self._reason()] += 1
            return args[0].dtype.is_floating_point * 0.0 if args[0].dtype != torch.bool else False
        if operation is _aten.record_stream.default:
            return None
        if operation is _aten.is_pinned.default:
            return False
        if operation is _aten._to_copy.default:
            target = kwargs.get("device")
            if target is not None and torch.device(target).type != args[0].device.type:
                return self._moved(args[0], torch.device(target), kwargs)
        if operation is _aten.copy_.default and args[0].device.type != args[1].device.type:
            self._note_copy(args[1], blocking=not (args[2] if len(args) > 2 else kwargs.get("non_blocking")))
            return args[0]
        if operation._overloadpacket in INDEXED and args[0].device.type == NAME:
            for index in _tensors_in(args[1:]):
                if index.device.type != NAME:
                    self._note_copy(index)
        return NotImplemented

    def _note_copy(self, tensor: Tensor, *, blocking: bool = True) -> None:
        """Note a copy of a tensor to the device, or a blocking one of a tensor on the device to the host."""
        noted = self.reads if tensor.device.type == NAME else self.uploads if blocking else self.pinned
        if blocking or noted is not self.reads:
            noted[self.phase, self._reason()] += 1

    def _reason(self) -> str:
        """Return why the host waits, or without a reason the place where it does."""
        self.reasons.update(REASONS[-1:])
        return REASONS[-1] if REASONS else _place()

    def _moved(self, tensor: Tensor, target: torch.device, kwargs: Mapping[str, Any]) -> Tensor:
        """Copy a tensor to the device, or back, where a blocking copy waits for the device."""
        dtype = kwargs.get("dtype") or tensor.dtype
        if NAME in (tensor.device.type, target.type):
            self._note_copy(tensor, blocking=not kwargs.get("non_blocking"))
        if target.type == NAME:
            with self._fake:
                moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self.device)
            self._see(moved)
            return moved
        if tensor.numel() <= SMALL:
            return torch.zeros(tensor.shape, dtype=dtype, device=target)
        with self._fake:
            return torch.empty(tensor.shape, dtype=dtype, device=target)

    def _note(self, operation: Any, args: tuple, kwargs: Mapping[str, Any], result: Any) -> None:
        """Count operations, bytes sent and attention kernels."""
        packet, name = operation._overloadpacket, operation._overloadpacket.__name__
        if packet in flop_registry:
            self.flops[self.phase] += flop_registry[packet](*args, **kwargs, out_val=result)
        if name in MATRIX_PRODUCTS and result.dtype == torch.float64:
            self.faults[self.phase, f"a matrix product in float64, in {_place()}"] += 1
        if "attention" in name and "backward" not in name:
            masked = " with a mask" if "efficient" in name and args[3] is not None else ""
            self.kernels[self.phase, name.removeprefix("_scaled_dot_product_") + masked] += 1
        if operation.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            kind, group, count = sent_bytes(name, args, result)
            self.sent[self.phase, kind, group] += count
            if operation.namespace != "c10d" and kind == "all-gather":
                size = [0]
                weakref.finalize(result.untyped_storage(), self._count_gathered, 0, size)
                self._count_gathered(result.untyped_storage().nbytes(), size)

    def _see(self, tensor: Tensor) -> None:
        """Count a storage that is new, if it is on the device."""
        if _is_on_device(tensor):
            super()._see(tensor)

    def _count(self, now: int, size: list[int]) -> None:
        """Count a storage of `size` bytes as one of `now` bytes."""
        super()._count(now, size)
        self._count_peak()

    def _count_peak(self) -> None:
        self.peaks[self.phase] = max(self.peaks[self.phase], self.current)

    def _count_gathered(self, now: int, size: list[int]) -> None:
        self.gathered += now - size[0]
        size[0] = now
        self.most_gathered = max(self.most_gathered, self.gathered)


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors_in(value)
    return found


def _is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on the pretended device; to ask a fake one for its `device` is an operation by itself."""
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type == NAME


def _shapes(value: Any) -> Any:
    """Return what of arguments decides the shapes of results: those of tensors, and all other values."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_shapes, value))
    if isinstance(value, dict):
        return tuple((name, _shapes(each)) for name, each in value.items())
    return type(value), value


def _is_large(operation: Any, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation makes a host tensor of a given shape that is too large to be real."""
    shape = args[0] if args and isinstance(args[0], list | tuple) else ()
    sizes = [size for size in shape if isinstance(size, int)]
    makes = operation._overloadpacket.__name__ in ("empty", "empty_strided", "zeros", "ones", "full", "randn", "rand")
    return makes and math.prod(sizes) > SMALL and torch.device(kwargs.get("device") or "cpu").type == "cpu"


def sent_bytes(name: str, args: tuple, result: Any) -> tuple[str, str, int]:
    """Return the kind of a collective, the name of its group and the bytes that one rank of a ring sends."""
    largest = max((tensor.nbytes for tensor in _tensors_in([*args, result])), default=0)
    group, ranks = next((found for value in reversed(args) if (found := _group_of(value))), ("", 1))
    for part, kind, factor in (
        ("gather", "all-gather", 1),
        ("reduce_scatter", "reduce-scatter", 1),
        ("all_to_all", "all-to-all", 1),
        ("alltoall", "all-to-all", 1),
        ("reduce", "all-reduce", 2),
    ):
        if part in name:
            return kind, group, factor * largest * (ranks - 1) // ranks
    return name, group, 0


def _group_of(value: object) -> tuple[str, int] | None:
    """Return the name and the number of ranks of what an operation calls its group; None for anything else."""
    if isinstance(value, str):
        return value, torch.distributed.distributed_c10d._resolve_process_group(value).size()
    if isinstance(value, torch.ScriptObject):
        with suppress(RuntimeError):
            group = ProcessGroup.unbox(value)
            return group.group_name, group.size()
    return None


def _place() -> str:
    """Return file, line and function of the innermost frame of the project, or of the user's own code."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "site-packages" not in path and "/lib/python" not in path and path not in _WAYS and path[0] != "<":
            shown = Path(path)
            shown = shown.relative_to(_PROJECT) if shown.is_relative_to(_PROJECT) else shown
            return f"{shown}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "the backward pass"


# What PyTorch has to know of such a device: its streams, its autocast and its attention kernels.

IN_HALF = (
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d"),
    "scaled_dot_product_attention",
)
"""Operations that CUDA's autocast computes in the lower precision, of those that the project uses."""

IN_FLOAT32 = ("layer_norm", "group_norm", "pow", "rsqrt", "exp", "log", "softmax", "cumsum")
"""Operations that it computes in float32."""


class _Stream:
    """A stream, or an event, on which nothing waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers = {"record_event": self, "query": True}
        return lambda *args, **kwargs: answers.get(name)


_STREAM = _Stream()

_ANSWERS = {
    "is_available": True,
    "is_initialized": True,
    "_is_in_bad_fork": False,
    "device_count": 1,
    "current_device": 0,
    "current_stream": _STREAM,
    "default_stream": _STREAM,
    "stream": nullcontext(),
    "device": nullcontext(),
    "get_amp_supported_dtype": [torch.bfloat16, torch.float16],
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),  # nothing draws from it
    **dict.fromkeys(("synchronize", "empty_cache", "set_device", "set_rng_state", "manual_seed_all")),
}


class _Device:
    """What PyTorch, FSDP2 and autocast ask of `torch.<device>`: one device that is ready, with one stream."""

    Stream = Event = _Stream

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _ANSWERS:
            raise AttributeError(name)
        return lambda *args, **kwargs: _ANSWERS[name]


@cache
def register() -> tuple[torch.library.Library, ...]:
    """Register the device with PyTorch, once; the libraries live as long as they are kept.

    It changes the whole process, because PyTorch takes it for the machine's accelerator from then on.
    """
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Device())
    fallback, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, dtype in ((IN_HALF, None), (IN_FLOAT32, torch.float32)):
        for packet in (getattr(_aten, name) for name in names):
            for overload in (getattr(packet, name) for name in packet.overloads() if "out" not in name):
                aten.impl(overload, _computed_in(overload, dtype), "AutocastPrivateUse1")
    aten.impl(_aten.scaled_dot_product_attention.default, _attention, "AutogradPrivateUse1")
    return fallback, aten


def _computed_in(operation: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Wrap an operation so that autocast computes it in `dtype`; None: in the precision of the autocast."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        """Compute it in that precision."""
        target = dtype or torch.get_autocast_dtype(NAME)

        def cast(value: Tensor) -> Tensor:
            """Convert what autocast converts: floating-point tensors, but not float64."""
            return value.to(target) if value.is_floating_point() and value.dtype != torch.float64 else value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*tree_map_only(Tensor, cast, args), **tree_map_only(Tensor, cast, kwargs))

    return kernel


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend with the kernel that CUDA chooses: flash in half precision without a mask, else the efficient one."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
