"""The Triton kernel of `sums.add_up`."""
# ruff: noqa: N803 (compile-time constants are in capitals, as is usual in Triton)

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Numbers of a program."""


@triton.jit
def triton_add_terms(
    total, own, arrived, length, own_stride, between, sample_stride, RANK: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """total [b, length] = own [b, length] + the terms of arrived [SIZE - 1, b, length], from rank 0 on.

    `own_stride` and `sample_stride` are the distances of two samples in own and in a term of arrived, `between` is that
    of two terms.
    """
    sample = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < length
    found = tl.zeros((BLOCK,), tl.float32)
    for of in tl.static_range(SIZE):
        if of == RANK:
            place = own + sample * own_stride
        else:
            before = sample * 0 + (RANK - of + SIZE) % SIZE - 1  # in 64 bits, as the product with `between`
            place = arrived + before * between + sample * sample_stride
        found += tl.load(place + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + sample * length + i, found.to(total.dtype.element_ty), mask=inside)


def add_terms(total: Tensor, own: Tensor, arrived: Tensor, rank: int) -> None:
    """See `sums.add_up`; total is contiguous, on the current GPU."""
    length = total[0].numel()
    strides = own.stride(0), arrived.stride(0), arrived.stride(1)
    grid = (triton.cdiv(length, BLOCK), len(total))
    triton_add_terms[grid](
        total, own, arrived, length, *strides, RANK=rank, SIZE=len(arrived) + 1, BLOCK=BLOCK, num_warps=8
    )
