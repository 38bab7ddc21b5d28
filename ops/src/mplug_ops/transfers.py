"""Asynchronous transfers between ranks, for use inside operators and without autograd.

Each function starts a transfer and returns an object to wait for before the result is used. All ranks of the group must
start transfers in the same order. On a GPU, waiting blocks the current stream, not the CPU. R ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from mplug_ops.operators import _all_gather_single, _group, _reduce_scatter_single
from mplug_ops.waits import waiting


def group_named(name: str) -> dist.ProcessGroup:
    """The process group with a name; operators receive the name instead of the group."""
    return _group(name)


class Transfer:
    """A tensor in transfer. The sent tensor must not change before `wait`."""

    def __init__(self, arriving: Tensor, works: list[Any], sent: Tensor) -> None:
        self._arriving, self._works, self._sent = arriving, works, sent

    def wait(self) -> Tensor:
        """Wait for the tensor and return it."""
        with waiting():
            for work in self._works:
                work.wait()
        self._works = []
        return self._arriving


def shift(x: Tensor, group: dist.ProcessGroup, by: int) -> Transfer:
    """Send x [...] to the rank `by` places after this one in the ring; receive from the rank `by` places before it."""
    x, arriving = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    rank, size = group.rank(), group.size()
    to, of = (dist.get_global_rank(group, (rank + step) % size) for step in (by, -by))
    pair = [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, arriving, of, group)]
    return Transfer(arriving, dist.batch_isend_irecv(pair), x)


def gathering(x: Tensor, group: dist.ProcessGroup) -> Transfer:
    """All-gather: the ranks' x [...], stacked: [R, ...]."""
    x, arriving = x.contiguous(), x.new_empty(group.size(), *x.shape)
    flat = arriving.flatten(0, 1) if x.dim() else arriving
    return Transfer(arriving, [_all_gather_single(flat, x, group=group, async_op=True)], x)


def summing(x: Tensor, group: dist.ProcessGroup) -> Transfer:
    """Reduce-scatter: this rank's slice [...] of the sum of the ranks' x [R, ...]."""
    x, arriving = x.contiguous(), x.new_empty(x.shape[1:])
    return Transfer(arriving, [_reduce_scatter_single(arriving, x.flatten(0, 1), group=group, async_op=True)], x)


def swapping(x: Tensor, group: dist.ProcessGroup, arriving: Tensor | None = None) -> Transfer:
    """All-to-all: x [R, ...] has a part for each rank -> [R, ...], the parts of all ranks for this one."""
    x, arriving = (
        x.contiguous(),
        torch.empty_like(x, memory_format=torch.contiguous_format) if arriving is None else arriving,
    )
    return Transfer(arriving, [dist.all_to_all_single(arriving, x, group=group, async_op=True)], x)


def trading(
    x: Tensor, counts_sent: Sequence[int], counts_received: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """All-to-all of rows: x [sent, ...] has `counts_sent` rows for each rank in order -> [received, ...], likewise."""
    x, arriving = x.contiguous(), x.new_empty(sum(counts_received), *x.shape[1:])
    counts = list(counts_received), list(counts_sent)
    return Transfer(arriving, [dist.all_to_all_single(arriving, x, *counts, group=group, async_op=True)], x)


# Several tensors in one launch on the current stream: the CPU waits for no GPU. x [R, n] has a row for every rank.


def join_each(tensors: Sequence[Tensor], own: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """All-gather: row r of each x [R, n] becomes rank r's `own` [n], which may be that row itself."""
    options = AllgatherOptions()
    options.asyncOp = False
    _finish(group.allgather_into_tensor_coalesced([x.flatten() for x in tensors], list(own), options))


def sum_each(totals: Sequence[Tensor], tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Reduce-scatter: each total [n] of rank r becomes the sum over the ranks of row r of x [R, n].

    A total may be the row itself. The other rows of x are undefined afterwards.
    """
    options = ReduceScatterOptions()
    options.asyncOp = False
    _finish(group.reduce_scatter_tensor_coalesced(list(totals), [x.flatten() for x in tensors], options))


def _finish(work: Any) -> None:
    """NCCL returns no work for a collective on the current stream; gloo always returns one."""
    if work is not None:
        work.wait()


# In place: x must stay allocated. Each returns a work to wait for before x is read or written.


def summing_parts(x: Tensor, group: dist.ProcessGroup) -> Any:
    """Reduce-scatter in place: own part of x [R n] becomes the sum over the ranks; the other parts are undefined."""
    own = x.view(group.size(), -1)[group.rank()]
    return _reduce_scatter_single(own, x, group=group, async_op=True)


def joining_parts(x: Tensor, group: dist.ProcessGroup) -> Any:
    """All-gather in place: each part of x [R n] becomes that of its rank."""
    own = x.view(group.size(), -1)[group.rank()]
    return _all_gather_single(x, own, group=group, async_op=True)


def summing_all(x: Tensor, group: dist.ProcessGroup) -> Any:
    """All-reduce in place: x becomes the sum of the ranks' x."""
    return dist.all_reduce(x, group=group, async_op=True)
