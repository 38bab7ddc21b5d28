"""What the ranks of a run exchange when they save and open checkpoints. Each function is collective.

A rank receives one object per call. Its size does not depend on the number of ranks, unless the object is about all of
them. Processes without a group (one process) skip the exchange.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from mplug.errors import RunError, UsageError
from mplug.run.run import Run
from mplug_saving.folder import OtherVersion

KINDS = (RunError, OtherVersion, UsageError)
"""The errors that ranks raise alike, the most important first: a rank that cannot read does not know the content."""
T = TypeVar("T")


def raise_alike(run: Run, error: UsageError | RunError | None) -> None:
    """Raise the error of one rank on all ranks: the first of `KINDS` that a rank has, from the lowest such rank."""
    size = run.mesh.world_size
    nothing = len(KINDS) * size
    own = nothing if error is None else _kind(error) * size + run.rank
    least = _least(run, own)
    if least < nothing:
        kind, rank = divmod(least, size)
        text = from_rank(run, rank, str(error))
        raise KINDS[kind](f"rank {rank}: {text}" if KINDS[kind] is RunError else text)


def from_rank(run: Run, rank: int, value: T) -> T:
    """The value of one rank, on every rank."""
    if run.groups is None:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, rank, run.groups.beside())
    return values[0]


def divided(run: Run, values: Sequence[T]) -> T:
    """This rank's element of rank 0's sequence, which has one per rank."""
    if run.groups is None:
        return values[0]
    import torch.distributed as dist

    own: list[Any] = [None]
    dist.scatter_object_list(own, list(values) if run.rank == 0 else None, 0, run.groups.beside())
    found: T = own[0]
    return found


def at_first(run: Run, value: T) -> list[T]:
    """The values of all ranks, in rank order, on rank 0; an empty list on other ranks."""
    if run.groups is None:
        return [value]
    import torch.distributed as dist

    values: list[Any] | None = [None] * run.mesh.world_size if run.rank == 0 else None
    dist.gather_object(value, values, 0, run.groups.beside())
    return values or []


def _least(run: Run, number: int) -> int:
    """The least of the ranks' numbers."""
    if run.groups is None:
        return number
    import torch
    import torch.distributed as dist

    numbers = torch.tensor(number)
    dist.all_reduce(numbers, dist.ReduceOp.MIN, run.groups.beside())
    return int(numbers)


def _kind(error: UsageError | RunError) -> int:
    return next(number for number, kind in enumerate(KINDS) if isinstance(error, kind))
