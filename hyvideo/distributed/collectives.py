"""Communication between ranks outside the model: agreement on values, on errors and on what one rank decides.

Without a process group every function acts for a single rank and costs nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Shard

from hyvideo.distributed.mesh import largest_share

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """Return every rank's `value`, in the order of ranks, on all of them (any small picklable value)."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rows(rows: Tensor, counts: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Join the rows `[counts[rank], ...]` of the ranks of a group on all of them; without a group return `rows`."""
    if group is None:
        return rows
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = functional.all_gather_single(padded, 0, group).split(max(counts))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


@contextmanager
def all_or_none(*kinds: type[Exception]) -> Iterator[None]:
    """Run a block on all ranks; an error of these kinds, by default `ValueError` and `OSError`, is raised on all.

    It is of the first kind, and names the ranks unless all failed alike.
    """
    kinds = kinds or (ValueError, OSError)
    error: Exception | None = None
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # only on this rank: what helps depends on where it happened, and the launcher ends the others
    except kinds as caught:
        error = caught
    said = gather(error and str(error))
    if not any(text is not None for text in said):
        return
    if error is not None and len(set(said)) == 1:
        raise error
    named = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None)
    raise kinds[0](named) from (error and error.__cause__ or error)


def broadcast_from_main(make: Callable[[], T]) -> T:
    """Return on all ranks what `make` returns on rank 0; the others do not call it.

    If it raises a `ValueError` or `OSError`, all ranks raise a ValueError.
    """
    if not dist.is_initialized():
        return make()
    sent, error = [None, None], None
    if dist.get_rank() == 0:
        try:
            sent[0] = make()
        except (ValueError, OSError) as caught:
            error, sent[1] = caught, str(caught)
    dist.broadcast_object_list(sent)
    if sent[1] is not None:
        raise ValueError(sent[1]) from error
    return sent[0]


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Average the gradients of unsharded weights over all ranks; those of sharded weights are averaged already."""
    gradients = [p.grad for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
    if not dist.is_initialized() or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, reduced in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(reduced.view_as(gradient))


def require_same(facts: Mapping[str, object]) -> None:
    """Raise a ValueError on all ranks unless they hold the same `facts`; it names what differs and on which rank."""
    first, *others = gather({name: repr(value) for name, value in facts.items()})
    differing = [
        f"{name} is {other.get(name)} on rank {rank}, but {first.get(name)} on rank 0"
        for rank, other in enumerate(others, start=1)
        for name in sorted({*first, *other})
        if other.get(name) != first.get(name)
    ]
    if differing:
        raise ValueError(
            f"the ranks were started with {len(differing)} different settings or files: {'; '.join(differing[:5])}. "
            "Start all with the same."
        )


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor (a view: writing changes the tensor), or a whole tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_shard_of(sharded: Tensor, local: Tensor) -> Tensor:
    """Return `local`, where it is, as this rank's part of a tensor that is sharded as `sharded` is.

    `DTensor.from_local` would copy a shard that rests in host memory to the GPU.
    """
    return DTensor(local, sharded._spec, requires_grad=False) if isinstance(sharded, DTensor) else local


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole, on every rank (a collective); other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(sharded: Tensor, full: Tensor) -> Tensor:
    """Return this rank's part of `full`, which all ranks have, split in dim 0 as `sharded` is; nothing is sent."""
    if not isinstance(sharded, DTensor):
        return full
    axis = sharded.placements.index(Shard(0))
    num_rows = largest_share(full.shape[0], sharded.device_mesh.size(axis))
    start = min(sharded.device_mesh.get_local_rank(axis) * num_rows, full.shape[0])
    return full[start : start + num_rows]
