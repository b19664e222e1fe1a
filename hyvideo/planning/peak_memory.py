"""Peak memory of tensors, counted as they are allocated and freed; fake tensors count like real ones."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary


class PeakMemory(TorchDispatchMode):
    """Adds up the storages that operations make inside the `with` block, until they are freed or resized.

    Each storage counts once, however many tensors view it. PyTorch's own tracker also says which module memory belongs
    to; for that it hooks into every module's backward pass, and keeps gradients alive that training frees.

    Attributes:
        current: bytes in use now.
        peak: the most so far; to begin a new one, set it to what is in use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._sizes = WeakIdKeyDictionary()  # storage -> [bytes], shared with what runs when it is freed
        self._paused = False

    def __enter__(self) -> "PeakMemory":
        # Under this lock DTensor works out shapes, on fake tensors of whole sizes that a real run does not make.
        self._lock = ShardingPropagator._fake_mode_lock
        ShardingPropagator._fake_mode_lock = patch.object(self, "_paused", True)
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            """Resize and recount: FSDP frees gathered weights this way, which is not an operation."""
            self._resize(storage, size)
            if storage in self._sizes:
                self._count(storage.nbytes(), self._sizes[storage])

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        ShardingPropagator._fake_mode_lock = self._lock
        super().__exit__(*error)

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again as the operations on its shards
        if operation is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # on fake tensors it would return a copy
        result = operation(*args, **(kwargs or {}))
        if not self._paused:
            tree_map_only(Tensor, self._see, result)
        return result

    def _see(self, tensor: Tensor) -> None:
        """Count a storage that is new."""
        storage = tensor.untyped_storage()
        if storage not in self._sizes:
            size = [0]
            self._sizes[storage] = size
            weakref.finalize(storage, self._count, 0, size)
            self._count(storage.nbytes(), size)

    def _count(self, now: int, size: list[int]) -> None:
        """Count a storage of `size` bytes as one of `now` bytes."""
        self.current += now - size[0]
        size[0] = now
        self.peak = max(self.peak, self.current)
