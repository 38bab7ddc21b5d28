"""Tensors on their way between ranks while something else is computed, for use inside operators, without autograd.

Each function begins a transfer, which all ranks of the group begin in the same order; what it returns is waited for
where it is needed. On a GPU the host does not wait, the current stream does. R ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mplug.ops.operators import _all_gather_single, _group, _reduce_scatter_single


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of a name: what an operator is given instead of a group."""
    return _group(name)


class Transfer:
    """A tensor that arrives. What is sent stays as it is until then."""

    def __init__(self, arriving: Tensor, works: list[Any], sent: Tensor) -> None:
        self._arriving, self._works, self._sent = arriving, works, sent

    def wait(self) -> Tensor:
        """The tensor, once it is there."""
        for work in self._works:
            work.wait()
        self._works = []
        return self._arriving


def shift(x: Tensor, group: dist.ProcessGroup, by: int) -> Transfer:
    """x [...] to the rank that comes `by` after this one in the ring; what arrives is of the rank `by` before it."""
    x, arriving = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    rank, size = group.rank(), group.size()
    to, of = (dist.get_global_rank(group, (rank + step) % size) for step in (by, -by))
    pair = [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, arriving, of, group)]
    return Transfer(arriving, dist.batch_isend_irecv(pair), x)


def gathering(x: Tensor, group: dist.ProcessGroup) -> Transfer:
    """The ranks' x [...], one after the other: [R, ...]."""
    x, arriving = x.contiguous(), x.new_empty(group.size(), *x.shape)
    flat = arriving.flatten(0, 1) if x.dim() else arriving
    return Transfer(arriving, [_all_gather_single(flat, x, group=group, async_op=True)], x)


def summing(x: Tensor, group: dist.ProcessGroup) -> Transfer:
    """This rank's of the sums of the ranks' x [R, ...]: [...]."""
    x, arriving = x.contiguous(), x.new_empty(x.shape[1:])
    return Transfer(arriving, [_reduce_scatter_single(arriving, x.flatten(0, 1), group=group, async_op=True)], x)


# In place, of memory that stays: each returns what is to be waited for before it is read or written.


def summing_parts(x: Tensor, group: dist.ProcessGroup) -> Any:
    """Of x [R n], this rank's part becomes the sum of the ranks' ones; what becomes of the others is left open."""
    own = x.view(group.size(), -1)[group.rank()]
    return _reduce_scatter_single(own, x, group=group, async_op=True)


def joining_parts(x: Tensor, group: dist.ProcessGroup) -> Any:
    """Each part of x [R n] becomes that of its rank."""
    own = x.view(group.size(), -1)[group.rank()]
    return _all_gather_single(x, own, group=group, async_op=True)


def summing_onto(x: Tensor, group: dist.ProcessGroup, owner: int) -> Any:
    """On the `owner`-th rank x becomes the sum of the ranks' x; what becomes of it elsewhere is left open."""
    return dist.reduce(x, dist.get_global_rank(group, owner), group=group, async_op=True)


def copying_from(x: Tensor, group: dist.ProcessGroup, owner: int) -> Any:
    """x becomes that of the `owner`-th rank."""
    return dist.broadcast(x, dist.get_global_rank(group, owner), group=group, async_op=True)


def summing_all(x: Tensor, group: dist.ProcessGroup) -> Any:
    """x becomes the sum of the ranks' x."""
    return dist.all_reduce(x, group=group, async_op=True)
