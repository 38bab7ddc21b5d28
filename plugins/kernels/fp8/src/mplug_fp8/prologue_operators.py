"""Norms and activations that give fp8 numbers, as operators: `prologue_emulation` on a CPU, kernels on a GPU.

N rows, I columns, P padded rows. `scale` [1] is known before, `statistic` [] is the largest absolute value of the step.
"""

from typing import Any, Optional

import torch
from torch import Tensor

import mplug_fp8.emulation as emulation
import mplug_fp8.prologue_emulation as prologue_emulation
from mplug_fp8.emulation import E4M3, padded
from mplug_fp8.prologue_emulation import Statistics
from mplug_nn import fake, operator

# torch reads an operator's schema from its annotated arguments.
Maybe = Optional[Tensor]  # noqa: UP045


@operator("mplug_fp8::normed", mutates_args=("statistic",))
def normed(
    x: Tensor,
    residual: Maybe,
    weight: Tensor,
    bias: Maybe,
    eps: float,
    centred: bool,
    scale: Tensor,
    statistic: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [N, I] -> rows [N, I], inverse [1], s [N, I] (without a residual: [0]), means [N] or [0], deviations [N].

    `statistic` becomes the maximum of itself and the largest absolute value of the norm, unless a backward pass repeats
    the forward pass.
    """
    keeps = torch._C._current_graph_task_id() == -1
    if x.is_cuda:
        import mplug_fp8.prologue_launch as prologue_launch

        rows, inverse, summed, statistics = _empty_norm(x, residual, centred)
        kept = statistic if keeps else None
        prologue_launch.normed(x, residual, weight, bias, eps, scale, kept, rows, inverse, summed, statistics)
        return rows, inverse, summed, *statistics
    summed = x.new_empty(0) if residual is None else x + residual
    whole = x if residual is None else summed
    statistics = prologue_emulation.statistics_of(whole, eps, centred)
    y = prologue_emulation.normed(whole, statistics, weight, bias)
    return _quantised(y, scale, statistic if keeps else None), torch.ones_like(scale) / scale, summed, *statistics


@fake("mplug_fp8::normed")
def _(x: Tensor, residual: Any, weight: Any, bias: Any, eps: Any, centred: bool, scale: Any, statistic: Any) -> Any:
    rows, inverse, summed, statistics = _empty_norm(x, residual, centred)
    return rows, inverse, summed, *statistics


def _empty_norm(x: Tensor, residual: Maybe, centred: bool) -> tuple[Tensor, Tensor, Tensor, Statistics]:
    n, i = x.shape
    means, deviations = (x.new_empty(size, dtype=torch.float32) for size in (n if centred else 0, n))
    summed = x.new_empty((0,) if residual is None else (n, i))
    return x.new_empty((n, i), dtype=E4M3), x.new_empty(1, dtype=torch.float32), summed, Statistics(means, deviations)


def _quantised(y: Tensor, scale: Tensor, statistic: Tensor | None) -> Tensor:
    if statistic is not None:
        statistic.copy_(torch.maximum(statistic, emulation.largest_of(y).to(statistic.dtype)))
    return emulation.rounded(y, scale, E4M3)


@operator("mplug_fp8::normed_again")
def normed_again(
    summed: Tensor, means: Tensor, deviations: Tensor, weight: Tensor, bias: Maybe, scale: Tensor, columns: bool
) -> Tensor:
    """s [N, I] -> the numbers that `normed` gives: columns [I, P] if asked for, else rows [N, I]."""
    statistics = Statistics(means, deviations)
    if summed.is_cuda:
        import mplug_fp8.prologue_launch as prologue_launch

        found = _empty_numbers(summed, summed.shape[1], columns)
        prologue_launch.normed_again(summed, statistics, weight, bias, scale, found, columns)
        return found
    rows = _quantised(prologue_emulation.normed(summed, statistics, weight, bias), scale, None)
    return emulation.transposed(rows) if columns else rows


@fake("mplug_fp8::normed_again")
def _(summed: Tensor, means: Any, deviations: Any, weight: Any, bias: Any, scale: Any, columns: bool) -> Tensor:
    return _empty_numbers(summed, summed.shape[1], columns)


def _empty_numbers(x: Tensor, width: int, columns: bool) -> Tensor:
    return x.new_empty((width, padded(len(x))) if columns else (len(x), width), dtype=E4M3)


@operator("mplug_fp8::norm_gradient")
def norm_gradient(
    grad_y: Tensor,
    grad_summed: Tensor,
    summed: Tensor,
    means: Tensor,
    deviations: Tensor,
    weight: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of the norm and of s [N, I] -> that of x [N, I], those of weight and bias [1 or 2, I]."""
    statistics = Statistics(means, deviations)
    if summed.is_cuda:
        import mplug_fp8.prologue_launch as prologue_launch

        grad_s, grads = _empty_gradients(summed, weight, has_bias)
        prologue_launch.norm_gradient(grad_y, grad_summed, summed, statistics, weight, grad_s, grads)
        return grad_s, grads
    return prologue_emulation.norm_gradient(grad_y, grad_summed, summed, statistics, weight, has_bias)


@fake("mplug_fp8::norm_gradient")
def _(
    grad_y: Any, grad_summed: Any, summed: Tensor, means: Any, deviations: Any, weight: Tensor, has_bias: bool
) -> Any:
    return _empty_gradients(summed, weight, has_bias)


def _empty_gradients(summed: Tensor, weight: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    return summed.new_empty(summed.shape), weight.new_empty((2 if has_bias else 1, len(weight)))


@operator("mplug_fp8::activated", mutates_args=("statistic",))
def activated(x: Tensor, bias: Maybe, kind: str, scale: Tensor, statistic: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, I] (swiglu: [N, 2I]) -> rows [N, I], inverse [1]; `statistic` as in `normed`."""
    keeps = torch._C._current_graph_task_id() == -1
    if x.is_cuda:
        import mplug_fp8.prologue_launch as prologue_launch

        rows, inverse = _empty_numbers(x, _width(x, kind), False), x.new_empty(1, dtype=torch.float32)
        prologue_launch.activated(x, bias, kind, scale, statistic if keeps else None, rows, inverse)
        return rows, inverse
    y = prologue_emulation.activated(x, bias, kind)
    return _quantised(y, scale, statistic if keeps else None), torch.ones_like(scale) / scale


@fake("mplug_fp8::activated")
def _(x: Tensor, bias: Any, kind: str, scale: Any, statistic: Any) -> Any:
    return _empty_numbers(x, _width(x, kind), False), x.new_empty(1, dtype=torch.float32)


@operator("mplug_fp8::activation_gradient")
def activation_gradient(
    grad: Tensor, x: Tensor, bias: Maybe, kind: str, scale: Tensor, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the activation [N, I] -> that of x, that of the bias (else [0]), and the numbers of `activated`.

    The numbers are columns [I, P] if asked for, else rows [N, I].
    """
    if x.is_cuda:
        import mplug_fp8.prologue_launch as prologue_launch

        grad_x, grad_bias, numbers = _empty_activation(x, bias, kind, columns)
        prologue_launch.activation_gradient(grad, x, bias, kind, scale, grad_x, grad_bias, numbers, columns)
        return grad_x, grad_bias, numbers
    wide = prologue_emulation.activation_gradient(grad, x, bias, kind)
    rows = _quantised(prologue_emulation.activated(x, bias, kind), scale, None)
    grad_bias = x.new_empty(0) if bias is None else wide.sum(0).to(bias.dtype)
    return wide.to(x.dtype), grad_bias, emulation.transposed(rows) if columns else rows


@fake("mplug_fp8::activation_gradient")
def _(grad: Any, x: Tensor, bias: Maybe, kind: str, scale: Any, columns: bool) -> Any:
    return _empty_activation(x, bias, kind, columns)


def _empty_activation(x: Tensor, bias: Maybe, kind: str, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    of_bias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    return x.new_empty(x.shape), of_bias, _empty_numbers(x, _width(x, kind), columns)


def _width(x: Tensor, kind: str) -> int:
    return x.shape[1] // (2 if kind == "swiglu" else 1)
