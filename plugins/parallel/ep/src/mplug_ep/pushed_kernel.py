"""The Triton kernels that write rows into the memory of other GPUs, and take those that have arrived.

N rows, D width, R ranks. Every address and every row begins at a multiple of 16 bytes, so threads move 16 bytes at
once. WIDTH is D rounded up to a power of two. A program moves one row.
"""
# ruff: noqa: N803 (compile-time constants are in capitals, as is usual in Triton)

import triton
import triton.language as tl


@triton.jit
def triton_push_rows(rows, rank, place, addresses, D: tl.constexpr, WIDTH: tl.constexpr):
    """Write row n of rows [N, D] to place[n] of the rows in the memory of rank[n], if this is not negative.

    rank [N] int32, place [N] int64, addresses [R] int64.
    """
    number = tl.program_id(0).to(tl.int64)
    to = tl.load(rank + number)
    if to >= 0:
        i = tl.arange(0, WIDTH)
        values = tl.load(rows + number * D + i, mask=i < D)
        address = tl.multiple_of(tl.load(addresses + to).to(tl.pointer_type(rows.dtype.element_ty)), 16)
        tl.store(address + tl.load(place + number) * D + i, values, mask=i < D)


@triton.jit
def triton_take_rows(arrived, written, rows, D: tl.constexpr, WIDTH: tl.constexpr):
    """rows[n] = arrived[n] if written[n] [N] int32 is not negative, else 0; both [N, D]."""
    number = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    kept = tl.load(written + number) >= 0
    values = tl.load(arrived + number * D + i, mask=(i < D) & kept, other=0.0)
    tl.store(rows + number * D + i, values, mask=i < D)
