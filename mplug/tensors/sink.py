"""Operators that add to a gradient sink's buffer. As operators, they can be part of a traced backward pass.

`stale` is a boolean on the CPU. True means that the buffer still holds the gradient of the last step: the first
addition overwrites the buffer and sets `stale` to false.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mplug.tensors.operator import operator

HALVES = (torch.bfloat16, torch.float16)
"""The dtypes of operands whose product torch can write as fp32 (`out_dtype`), on a GPU. It offers no other pair."""
ALIGNMENT = 16
"""Bytes: libraries of matrix products write to addresses that are multiples of it."""


class Operand(NamedTuple):
    """A weight [O, I] or a stack of them [e, O, I], and the copies that a product's `cast` returns.

    If ranks have gathered copies instead of the weight (`GatheredForm`), the values are NaN.
    """

    values: Tensor
    casts: tuple[Tensor, ...] = ()


class Sink(NamedTuple):
    """Where a weight's gradient is added: `total`, of its shape, and `stale`, which is true before the first addition.

    `add_product(*sink, a, b)` adds a product. Code that can only add calls `zero_if_stale(*sink)`
    first.
    """

    total: Tensor
    stale: Tensor


class Weights(NamedTuple):
    """A weight [O, I], a table [V, D] or a stack of weights [e, O, I], with the gradient sink that it has in training.

    `main_grad` (of the shape of `values`) and `stale` belong to the sink. Both are None if autograd keeps the gradient.
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
    """If `stale` is true, set total to zero and `stale` to false; for code that can only add."""
    if stale:
        total.zero_()
        stale.fill_(False)


def aligned(total: Tensor) -> Tensor:
    """`total`, or a copy of it if it is not contiguous or does not begin at a multiple of 16 bytes.

    Sinks are parts of one tensor: after a parameter of 3 elements, the next one begins at an odd address. cuBLAS has no
    product of 8-bit numbers that writes to such an address. A supplier that lets a library write to a sink writes to
    this tensor, and copies it to the sink if it is another one.
    """
    suits = total.is_contiguous() and total.data_ptr() % ALIGNMENT == 0
    return total if suits else total.clone(memory_format=torch.contiguous_format)


@operator("mplug::add_product", mutates_args=("total", "stale"))
def add_product(total: Tensor, stale: Tensor, a: Tensor, b: Tensor) -> None:
    """total [O, I] += a [O, N] b [N, I], in the dtype that can hold all three; rounded to total's dtype once.

    If `stale` is true, total becomes the product. Any floating-point dtypes may meet: a router multiplies in fp32, and
    a gradient that nothing is added to has the weights' dtype. On a GPU, products of bf16 or fp16 operands are added to
    an fp32 total in one operation, without a copy of the operands. Only a total that is narrower than the operands
    needs a second pass over memory.
    """
    beta = 0 if stale else 1
    stale.fill_(False)
    operands = torch.promote_types(a.dtype, b.dtype)
    common = torch.promote_types(operands, total.dtype)
    if a.is_cuda and a.dtype == b.dtype and a.dtype in HALVES and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif common == total.dtype:
        total.addmm_(a.to(common), b.to(common), beta=beta)
    else:
        product = a.to(common) @ b.to(common)
        total.copy_(product.add_(total) if beta else product)


@operator("mplug::add_rows", mutates_args=("total", "stale"))
def add_rows(total: Tensor, stale: Tensor, indices: Tensor, rows: Tensor) -> None:
    """`total[indices] += rows`: total [V, D], indices [N], rows [N, D]. Bitwise deterministic if indices repeat.

    On a GPU, rows with the same index are first summed in the dtype that can hold rows and total (at least fp32). The
    sum is rounded to total's dtype once.
    """
    zero_if_stale(total, stale)
    if total.is_cuda:
        indices, rows = _unique(indices, rows, len(total), total.dtype)
    total.index_add_(0, indices, rows.to(total.dtype))


def _unique(indices: Tensor, rows: Tensor, below: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(indices, rows [N, D]) such that each index `below` has one row of sums; spare rows are zero.

    The sums have the dtype that can hold the rows and `dtype`, and at least fp32.

    Parallel additions to a table happen in any order. So rows with the same index are summed before, over sorted
    indices. No size here depends on the indices, because that would make the CPU wait for the device.
    """
    ordered, order = indices.sort(stable=True)
    begins = torch.ones_like(ordered)
    begins[1:] = ordered[1:] != ordered[:-1]
    number = begins.cumsum(0) - 1  # [N]: each sorted index's number among the distinct ones
    which = torch.empty_like(number).scatter_(0, order, number)
    wide = rows.to(torch.promote_types(torch.promote_types(rows.dtype, dtype), torch.float32))
    sums = torch.ops.aten.embedding_dense_backward(wide, which, len(indices), -1, False)
    anywhere = torch.arange(len(indices), device=indices.device) % below
    return anywhere.scatter_(0, number, ordered), sums
