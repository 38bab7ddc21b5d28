"""Adding to a gradient sink's buffer: operators, so that a traced backward pass may do it.

`stale`, a boolean on the CPU, says that the buffer holds the last step's gradient still: whoever comes first overwrites
it, and makes `stale` false.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mplug.nn.operator import operator


class Weights(NamedTuple):
    """A weight [O, I], a table [V, D] or this rank's experts [e, O, I], and the gradient sink it has while training.

    `main_grad`, of the shape of `values`, and `stale` are the sink's; both are None where autograd keeps the gradient.
    """

    values: Tensor
    main_grad: Tensor | None = None
    stale: Tensor | None = None

    @classmethod
    def of(cls, parameter: Tensor) -> "Weights":
        """A parameter and its sink."""
        return cls(parameter, getattr(parameter, "main_grad", None), getattr(parameter, "main_grad_stale", None))


@operator("mplug::zero_if_stale", mutates_args=("total", "stale"))
def zero_if_stale(total: Tensor, stale: Tensor) -> None:
    """Where `stale` is true, total becomes zero, and `stale` false: for those who can only add."""
    if stale:
        total.zero_()
        stale.fill_(False)


@operator("mplug::add_product", mutates_args=("total", "stale"))
def add_product(total: Tensor, stale: Tensor, a: Tensor, b: Tensor) -> None:
    """total [O, I] += a [O, N] b [N, I], summed and kept in total's precision whatever a's and b's is.

    Where `stale`, total becomes the product. On a GPU the product itself adds: nothing is rounded, and nothing passes
    through memory a second time.
    """
    beta = 0 if stale else 1
    stale.fill_(False)
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


@operator("mplug::add_rows", mutates_args=("total", "stale"))
def add_rows(total: Tensor, stale: Tensor, indices: Tensor, rows: Tensor) -> None:
    """total [V, D] [indices [N]] += rows [N, D], of which several may be meant for one row; the same bits every time.

    Rows that are meant for one are summed in fp32 at least first, and rounded to total's precision once.
    """
    zero_if_stale(total, stale)
    if total.is_cuda:
        indices, rows = _unique(indices, rows, len(total))
    total.index_add_(0, indices, rows.to(total.dtype))


def _unique(indices: Tensor, rows: Tensor, below: int) -> tuple[Tensor, Tensor]:
    """(indices, rows [N, D] in fp32 at least) with each index `below` once; what is left over is zero rows.

    Adding to a table in parallel adds in any order; so what has the same index is summed before, over sorted indices.
    Nothing here has a size that depends on the indices, which would make the host wait.
    """
    ordered, order = indices.sort(stable=True)
    begins = torch.ones_like(ordered)
    begins[1:] = ordered[1:] != ordered[:-1]
    number = begins.cumsum(0) - 1  # of the distinct index that a sorted one is
    which = torch.empty_like(number).scatter_(0, order, number)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    sums = torch.ops.aten.embedding_dense_backward(wide, which, len(indices), -1, False)
    anywhere = torch.arange(len(indices), device=indices.device) % below
    return anywhere.scatter_(0, number, ordered), sums
