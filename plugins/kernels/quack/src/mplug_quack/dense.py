"""The products of an MLP without an activation in them, by QuACK or by torch. T tokens, I input, O output.

QuACK writes or adds the gradient of a weight to its sink in fp32, without a copy. Its tile is the one that is fastest
for products of groups with many rows (`grouped.py`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mplug_nn import Weights, fake, operator, weight_gradient
from mplug_quack.grouped import LARGE
from mplug_quack.rows import aligned_rows


@operator("mplug_quack::multiply")
def multiply(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """rows [T, I] times weightᵀ, weight [O, I], if `transposed`; else times weight [I, O] -> [T, O]."""
    y = rows.new_empty(len(rows), weight.shape[0 if transposed else 1])
    if y.numel():
        weight = aligned_rows(weight)
        _multiply(aligned_rows(rows), weight if transposed else weight.t(), y)
    return y


@fake("mplug_quack::multiply")
def _(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0 if transposed else 1])


@operator("mplug_quack::add_multiplied", mutates_args=("total", "stale"))
def add_multiplied(total: Tensor, stale: Tensor, a: Tensor, b: Tensor) -> None:
    """total [O, I] += aᵀ b of a [T, O] and b [T, I], in the dtype of `total`; the product overwrites a stale total."""
    if not len(a):
        if stale:
            total.zero_()
    elif total.is_contiguous() and total.data_ptr() % 16 == 0:
        _multiply(aligned_rows(a).t(), aligned_rows(b).t(), total, add_to_output=not stale)
    else:
        product = torch.empty(total.shape, dtype=total.dtype, device=total.device)
        add_multiplied(product, torch.ones((), dtype=torch.bool), a, b)
        total.copy_(product) if stale else total.add_(product)
    stale.fill_(False)


def _multiply(a: Tensor, b: Tensor, y: Tensor, **options: Any) -> None:
    """y = a bᵀ by QuACK; a [m, k], b [n, k], each contiguous along one of the two."""
    from quack.gemm import gemm

    shape = LARGE.rows, LARGE.columns, LARGE.cluster_rows, LARGE.cluster_columns
    gemm(a[None], b[None], y[None], None, None, *shape, pingpong=LARGE.pingpong, **options)


def _gradient_of(grad_y: Tensor, x: Tensor, weight: Weights) -> Tensor | None:
    """grad_yᵀ x [O, I] of grad_y [..., O] and x [..., I]: added to the weight's sink, or returned if it has none."""
    if weight.main_grad is None or weight.stale is None:
        return weight_gradient(grad_y, x, weight)
    add_multiplied(weight.main_grad, weight.stale, grad_y.flatten(0, -2), x.flatten(0, -2))
    return None


class Products(NamedTuple):
    """The products: `multiply(rows, weight, transposed)` and `gradient(grad_y, x, weight)`."""

    multiply: Callable[[Tensor, Tensor, bool], Tensor]
    gradient: Callable[[Tensor, Tensor, Weights], Tensor | None]


def _by_torch(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return rows @ (weight.t() if transposed else weight)


PRODUCTS = {"fused": Products(_by_torch, weight_gradient), "all": Products(multiply, _gradient_of)}
"""By the values of `kernels.quack.products`."""


@register_flop_formula(torch.ops.mplug_quack.multiply)
def _flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Two FLOPs per multiply-add of every row."""
    return 2 * rows[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.mplug_quack.add_multiplied)
def _flops_of_sum(total: tuple[int, ...], stale: Any, a: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Two FLOPs per multiply-add of every row, in a weight's gradient."""
    return 2 * a[0] * total[0] * total[1]
