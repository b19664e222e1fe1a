"""What PyTorch has to know of a device that does not exist: its streams, its autocast and its attention kernels.

Registering it changes the whole process, because PyTorch takes it for the machine's accelerator from then on.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"

IN_HALF = (
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d"),
    "scaled_dot_product_attention",
)
"""Operations that CUDA's autocast computes in the lower precision, of those that the project uses."""

IN_FLOAT32 = ("layer_norm", "group_norm", "pow", "rsqrt", "exp", "log", "softmax", "cumsum")
"""Operations that it computes in float32."""

_aten = torch.ops.aten


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
    """Register the device with PyTorch, once; the libraries live as long as they are kept."""
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
