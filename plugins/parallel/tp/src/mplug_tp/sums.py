"""The sum of the products of several ranks, in one pass."""

from functools import cache

import torch
from torch import Tensor

from mplug import triton_builds


def add_up(total: Tensor, own: Tensor, arrived: Tensor, rank: int) -> None:
    """total [b, n, X] = the sum of own [b, n, X] and arrived [R - 1, b, n, X], in the order of the ranks.

    `arrived` begins with that of the rank before `rank`, then the one before that. Terms are added in fp32 at least,
    and the sum is rounded once to the dtype of total. The rows [n, X] of a sample are contiguous in all three.
    """
    size = len(arrived) + 1
    terms = [own if of == rank else arrived[(rank - of) % size - 1] for of in range(size)]
    if size == 2:
        torch.add(*terms, out=total)  # it adds two terms in fp32
    elif total.is_cuda and total.itemsize < 8 and _has_kernel():
        from mplug_tp.sums_kernel import add_terms

        add_terms(total, own, arrived, rank)
    else:
        found = terms[0].to(torch.promote_types(total.dtype, torch.float32), copy=True)
        for term in terms[1:]:
            found += term
        total.copy_(found)


@cache
def _has_kernel() -> bool:
    """Whether this machine can build the kernel; without, the sum takes several passes."""
    return triton_builds()
