"""Matrix products by Transformer Engine's `general_gemm`, as torch operators. M, N, K: dimensions of operands.

fp8 operands are plain tensors (`mplug_te.casts`). An operator makes Transformer Engine's light containers from them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mplug_nn import Sink, aligned, fake, operator
from mplug_te.library import library, number_of


class Quantised(NamedTuple):
    """Numbers [M, K] of a format, contracted along their rows, with their inverses.

    `square`: 128 x 128 numbers have one scale.
    """

    values: Tensor
    inverses: Tensor
    format_name: str
    square: bool = False


def multiply(a: Quantised, b: Quantised, rows: int, precise: bool, dtype: torch.dtype) -> Tensor:
    """The first `rows` rows of b aᵀ, of a [M, K] and b [N, K]: [rows, M]; see `product`."""
    of_b = b.values, b.inverses, b.format_name
    return product(a.values, a.inverses, a.format_name, a.square, *of_b, rows, precise, dtype)


def add_multiplied(sink: Sink, a: Quantised, b: Quantised) -> None:
    """Add b aᵀ [N, M] to a sink."""
    total, stale = sink
    add_product(total, stale, a.values, a.inverses, a.format_name, b.values, b.inverses, b.format_name)


def operand(values: Tensor, inverses: Tensor, format_name: str, square: bool) -> Any:
    """The container of values [M, K] (uint8) that are contracted along their rows."""
    te, number = library().te, number_of(getattr(torch, format_name))
    if inverses.dim() == 1:
        return te.Float8TensorStorage(data=values, fp8_scale_inv=inverses, fp8_dtype=number)
    return te.Float8BlockwiseQTensorStorage(values, inverses, None, None, number, None, square)


@operator("mplug_te::product")
def product(
    a: Tensor,
    a_inverses: Tensor,
    a_format: str,
    square: bool,
    b: Tensor,
    b_inverses: Tensor,
    b_format: str,
    rows: int,
    precise: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The first `rows` rows of b aᵀ, of fp8 numbers a [M, K] and b [N, K]: [rows, M].

    `square`: a has a scale for each 128 x 128 numbers. `precise`: partial sums are added in fp32 registers (Hopper's
    tensor cores keep 14 bits of sums).
    """
    operands = operand(a, a_inverses, a_format, square), operand(b, b_inverses, b_format, False)
    found: Tensor = library().extensions.general_gemm(*operands, out_dtype=dtype, use_split_accumulator=precise)[0]
    return found[:rows]


@fake("mplug_te::product")
def _(
    a: Tensor,
    a_inverses: Tensor,
    a_format: str,
    square: bool,
    b: Tensor,
    b_inverses: Tensor,
    b_format: str,
    rows: int,
    precise: bool,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((rows, a.shape[0]), dtype=dtype)


@operator("mplug_te::add_product", mutates_args=("total", "stale"))
def add_product(
    total: Tensor,
    stale: Tensor,
    a: Tensor,
    a_inverses: Tensor,
    a_format: str,
    b: Tensor,
    b_inverses: Tensor,
    b_format: str,
) -> None:
    """total [N, M] += b aᵀ, of fp8 numbers a [M, K] and b [N, K], in one pass over the total.

    If `stale` is true, the product overwrites the total, and `stale` becomes false.
    """
    operands = operand(a, a_inverses, a_format, False), operand(b, b_inverses, b_format, False)
    _add(total, stale, *operands, use_split_accumulator=True)


@operator("mplug_te::half_product")
def half_product(weight: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """x [N, I] weight [O, I]ᵀ -> [N, O] if `transposed`; else x [N, O] weight [O, I] -> [N, I]; bf16 or fp16."""
    layout = "TN" if transposed else "NN"
    named: dict[str, Any] = {"out_dtype": x.dtype, "layout": layout}
    found: Tensor = library().extensions.general_gemm(weight.contiguous(), x.contiguous(), **named)[0]
    return found


@fake("mplug_te::half_product")
def _(weight: Tensor, x: Tensor, transposed: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0 if transposed else 1]))


@operator("mplug_te::half_gradient")
def half_gradient(x: Tensor, grad_y: Tensor) -> Tensor:
    """grad_yᵀ x [O, I] of x [N, I] and grad_y [N, O], in their dtype."""
    named: dict[str, Any] = {"out_dtype": x.dtype, "layout": "NT"}
    found: Tensor = library().extensions.general_gemm(x.contiguous(), grad_y.contiguous(), **named)[0]
    return found


@fake("mplug_te::half_gradient")
def _(x: Tensor, grad_y: Tensor) -> Tensor:
    return x.new_empty((grad_y.shape[1], x.shape[1]))


@operator("mplug_te::add_half_gradient", mutates_args=("total", "stale"))
def add_half_gradient(total: Tensor, stale: Tensor, x: Tensor, grad_y: Tensor) -> None:
    """total [O, I] += grad_yᵀ x, accumulated in total's dtype; see `add_product` for `stale`."""
    _add(total, stale, x.contiguous(), grad_y.contiguous(), layout="NT")


def _add(total: Tensor, stale: Tensor, a: Any, b: Any, **named: Any) -> None:
    own = aligned(total)
    accumulate = not bool(stale)
    stale.fill_(False)
    library().extensions.general_gemm(a, b, out_dtype=total.dtype, out=own, accumulate=accumulate, **named)
    if own is not total:
        total.copy_(own)
