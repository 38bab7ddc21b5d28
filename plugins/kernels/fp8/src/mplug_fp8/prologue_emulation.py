"""The definition of norms and activations that give fp8 numbers, in plain torch. N rows, I columns.

A norm computes in fp32 from the sum s = x + residual, rounded to the type of x. It multiplies from left to right,
without fused multiply-adds: ((s - mean) * deviation) * weight + bias, where `deviation` is the reciprocal standard
deviation. An activation computes in fp32 from x + bias, rounded to the type of x. The result is quantised from fp32.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Statistics(NamedTuple):
    """Of each row: the mean [N] (RMSNorm: [0]), and the reciprocal standard deviation [N]."""

    means: Tensor
    deviations: Tensor


def statistics_of(summed: Tensor, eps: float, centred: bool) -> Statistics:
    """s [N, I] -> its statistics, in fp32."""
    wide = summed.float()
    means = wide.mean(1) if centred else wide.new_empty(0)
    if centred:
        wide = wide - means[:, None]
    return Statistics(means, torch.rsqrt((wide * wide).mean(1) + eps))


def normed(summed: Tensor, statistics: Statistics, weight: Tensor, bias: Tensor | None) -> Tensor:
    """s [N, I], weight and bias [I] -> the norm [N, I] in fp32."""
    y = _scaled(summed, statistics) * weight.float()
    return y if bias is None else y + bias.float()


def norm_gradient(
    grad_y: Tensor, grad_summed: Tensor, summed: Tensor, statistics: Statistics, weight: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """(the gradient of s [N, I], the gradients of the weight and the bias [1 or 2, I]).

    With n the scaled s and g = grad_y * weight: the gradient of s is deviation * (g - mean(g) - n * mean(g * n)) +
    grad_summed; RMSNorm omits mean(g).
    """
    n, upstream = _scaled(summed, statistics), grad_y.float()
    g = upstream * weight.float()
    inner = g - n * (g * n).mean(1, keepdim=True)
    if len(statistics.means):
        inner = inner - g.mean(1, keepdim=True)
    grad_s = inner * statistics.deviations[:, None] + grad_summed.float()
    of_weights = [(upstream * n).sum(0), *([upstream.sum(0)] if has_bias else [])]
    return grad_s.to(summed.dtype), torch.stack(of_weights).to(weight.dtype)


def _scaled(summed: Tensor, statistics: Statistics) -> Tensor:
    wide = summed.float()
    if len(statistics.means):
        wide = wide - statistics.means[:, None]
    return wide * statistics.deviations[:, None]


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias in the type of x, then in fp32."""
    return (x if bias is None else x + bias.to(x.dtype)).float()


def activated(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """x [N, I] (swiglu: [N, 2I]) -> its activation [N, I] in fp32."""
    wide = biased(x, bias)
    if kind == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        return F.silu(gate) * up
    return F.gelu(wide, approximate="tanh" if kind == "gelu_tanh" else "none")


def activation_gradient(grad: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The gradient of the activation [N, I] -> that of x, of its shape, in fp32."""
    wide, grad = biased(x, bias), grad.float()
    if kind == "swiglu":
        gate, up = wide.chunk(2, dim=1)
        return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=1)
    return torch.ops.aten.gelu_backward(grad, wide, approximate="tanh" if kind == "gelu_tanh" else "none")
