"""Collectives as torch operators: a compiled graph has one opaque node for each.

A traced torch collective becomes a functional one; inductor reuses its buffers and moves its waits. An operator of
mplug has finished when it returns. A compiler may reorder operators that do not depend on each other. So the ranks of a
group must compile equal graphs, which gives them the same order. Groups are passed by name.
"""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from mplug.tensors.operator import fake, operator
from mplug_ops.waits import waiting
from mplug_ops.words import packed, put

# torch 2.13 has new names for these two; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

AT_ONCE = 16
"""Maximum number of slices sent without packing, in one launch; more slices are first packed into one tensor."""


def _group(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore
    return group


def _slices(x: Tensor, dim: int) -> list[Tensor]:
    """x [..., n, ...] cut before `dim` into contiguous slices [n, ...]; an empty list if packing is better."""
    count = prod(x.shape[:dim])
    return list(x.flatten(0, dim - 1)) if x.is_cuda and dim > 0 and 1 < count <= AT_ONCE else []


@operator("mplug::all_reduce")
def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The sum ('SUM') or maximum ('MAX') of the ranks' x [...], in a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    with waiting():
        dist.all_reduce(total, getattr(dist.ReduceOp, op), group=_group(group))
    return total


@fake("mplug::all_reduce")
def _(x: Tensor, op: str, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("mplug::all_gather")
def all_gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """The ranks' x [..., n, ...] concatenated along `dim`: [..., R n, ...]."""
    x, joined = x.contiguous(), x.new_empty(*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])
    if parts := _slices(x, dim):
        with waiting():
            _group(group).allgather_into_tensor_coalesced(_slices(joined, dim), parts).wait()
        return joined
    if prod(x.shape[:dim]) == 1:
        with waiting():
            _all_gather_single(joined.flatten(0, dim), x.flatten(0, dim), group=_group(group))
        return joined
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    with waiting():
        _all_gather_single(gathered, x, group=_group(group))
    put(joined.unflatten(dim, (size, -1)), gathered.unflatten(0, (size, -1)).movedim(0, dim))  # [..., R, n, ...]
    return joined


@fake("mplug::all_gather")
def _(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    return x.new_empty(*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])


@operator("mplug::reduce_scatter")
def reduce_scatter(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """This rank's part of the sum of the ranks' x [..., R n, ...] along `dim`: [..., n, ...]."""
    x, own = x.contiguous(), x.new_empty(*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    if parts := _slices(x, dim):
        with waiting():
            _group(group).reduce_scatter_tensor_coalesced(_slices(own, dim), parts).wait()
        return own
    parts_of_ranks = packed(x.unflatten(dim, (size, -1)).movedim(dim, 0))  # [R, ..., n, ...]; no copy if dim is 0
    with waiting():
        _reduce_scatter_single(own, parts_of_ranks.flatten(0, 1), group=_group(group))
    return own


@fake("mplug::reduce_scatter")
def _(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    return x.new_empty(*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])


@operator("mplug::all_to_all")
def all_to_all(x: Tensor, split_dim: int, join_dim: int, size: int, group: str) -> Tensor:
    """Own part along `split_dim` of every rank's x [..., R n, ..., m, ...], concatenated: [..., n, ..., R m, ...]."""
    parts = packed(x.unflatten(split_dim, (size, -1)).movedim(split_dim, 0))  # [R, ..., n, ..., m, ...]
    received = torch.empty_like(parts)
    with waiting():
        dist.all_to_all_single(received, parts, group=_group(group))
    return packed(received.movedim(0, join_dim)).flatten(join_dim, join_dim + 1)


@fake("mplug::all_to_all")
def _(x: Tensor, split_dim: int, join_dim: int, size: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[split_dim] //= size
    shape[join_dim] *= size
    return x.new_empty(shape)
