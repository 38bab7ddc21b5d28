"""Differentiable collectives over a process group of R ranks.

Each function's backward is its dual: the forward of one is the backward of the other.

    function        forward                                   backward
    copy            x                                         sum of the ranks' gradients        f of arXiv 1909.08053
    reduce          sum of the ranks' x                       gradient                           g of arXiv 1909.08053
    gather(dim)     the ranks' x, concatenated along dim      sum of gradients, own part         g of arXiv 2205.05198
    scatter(dim)    sum of the ranks' x, own part of dim      the ranks' gradients, concatenated its dual there
    split(dim)      own part of dim                           the ranks' gradients, concatenated
    join(dim)       the ranks' x, concatenated along dim      gradient, own part
    exchange(i, j)  own part along i of the ranks' x,         the same with the ranks'           arXiv 2309.14509
                    concatenated along j                      gradients, along j and i

If the group is None (one rank), every function is the identity.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops.operators as operators

Group = dist.ProcessGroup | None

# Plain collectives, for tensors that need no gradient.


def all_reduce(x: Tensor, group: Group, op: Literal["SUM", "MAX"] = "SUM") -> Tensor:
    """The sum or the maximum of the ranks' x [...], in a new tensor."""
    if group is None:
        return x
    total: Tensor = operators.all_reduce(x, op, group.group_name)
    return total


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """The ranks' x [..., n, ...] concatenated along `dim`: [..., R n, ...]."""
    if group is None:
        return x
    joined: Tensor = operators.all_gather(x, dim % x.dim(), group.size(), group.group_name)
    return joined


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part of the sum of the ranks' x [..., R n, ...] along `dim`: [..., n, ...]."""
    if group is None:
        return x
    own: Tensor = operators.reduce_scatter(x, dim % x.dim(), group.size(), group.group_name)
    return own


def own_part(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part of x [..., R n, ...] along `dim`: [..., n, ...]."""
    if group is None:
        return x
    dim = dim % x.dim()
    part: Tensor = x.unflatten(dim, (group.size(), -1)).select(dim, group.rank())
    # Compiled by torch 2.11, a tensor that `contiguous` returns unchanged has a zero gradient (pytorch issue 180642).
    return part if part.is_contiguous() else part.contiguous()


def all_to_all(x: Tensor, group: Group, split_dim: int, join_dim: int) -> Tensor:
    """Own part along `split_dim` of every rank's x [..., R n, ..., m, ...], concatenated: [..., n, ..., R m, ...]."""
    if group is None:
        return x
    split_dim, join_dim = split_dim % x.dim(), join_dim % x.dim()
    received: Tensor = operators.all_to_all(x, split_dim, join_dim, group.size(), group.group_name)
    return received


# The differentiable ones.


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ARG004
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.group, ctx.dim), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return own_part(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.group, ctx.dim), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_part(grad, ctx.group, ctx.dim), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split_dim: int, join_dim: int) -> Tensor:
        ctx.group, ctx.split_dim, ctx.join_dim = group, split_dim, join_dim
        return all_to_all(x, group, split_dim, join_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.group, ctx.join_dim, ctx.split_dim), None, None, None


def _apply(function: type[torch.autograd.Function], x: Tensor, group: Group, *dim: int) -> Tensor:
    if group is None:
        return x
    result: Tensor = function.apply(x, group, *dim)
    return result


def copy(x: Tensor, group: Group) -> Tensor:
    """Return x; backward sums the gradient over the ranks."""
    return _apply(_Copy, x, group)


def reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' x; backward passes the gradient unchanged."""
    return _apply(_Reduce, x, group)


def gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """The ranks' x [..., n, ...] concatenated: [..., R n, ...]; backward returns own part of the summed gradients."""
    return _apply(_Gather, x, group, dim)


def scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part of the sum of the ranks' x [..., R n, ...]; backward concatenates the ranks' gradients."""
    return _apply(_Scatter, x, group, dim)


def split(x: Tensor, group: Group, dim: int) -> Tensor:
    """Own part of x [..., R n, ...], which is equal on all ranks; backward concatenates the ranks' gradients."""
    return _apply(_Split, x, group, dim)


def join(x: Tensor, group: Group, dim: int) -> Tensor:
    """The ranks' x [..., n, ...] concatenated; backward returns own part of the gradient, equal on all ranks."""
    return _apply(_Join, x, group, dim)


def exchange(x: Tensor, group: Group, split_dim: int, join_dim: int) -> Tensor:
    """x [..., R n, ..., m, ...] divided along `join_dim` -> [..., n, ..., R m, ...] divided along `split_dim`."""
    return _apply(_Exchange, x, group, split_dim, join_dim)
