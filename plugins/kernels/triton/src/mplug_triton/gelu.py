"""Exact GELU for compiled units: the supplier of `MLP.activation`.

On a GPU, torch's erf and not memory bandwidth limits GELU; a fitted power of two (`mplug_nn.normal_tail`) replaces
it here.
The compiler traces this code. It can fuse it with its neighbours, and recompute it if a backward product needs it.
"""

from typing import Any

import torch
from torch import Tensor

from mplug_nn import NORMAL_TAIL, NORMAL_TAIL_END, NORMAL_TAIL_SLOPE
from mplug_nn.mlp import Kind
from mplug_nn.mlp import activation as composition
from mplug_nn.normal_tail import polynomial


def activation(x: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    """x [..., F] (swiglu: [..., 2F]) plus bias -> [..., F] in the type of x.

    'gelu' is computed in fp32: before they are rounded to the type of x, values are off by 1e-6 at most and slopes by
    2.8e-6. Infinities give the limits of GELU: inf and 0, with slopes 1 and 0. Other kinds call the default
    composition.
    """
    if kind != "gelu":
        return composition(x, bias, kind)
    y: Tensor = _GELU.apply(x if bias is None else x + bias)  # type: ignore[no-untyped-call]
    return y


class _GELU(torch.autograd.Function):
    """y = x Phi(x), grad_x = (Phi(x) + x phi(x)) grad_y; all [..., F]; saves x only (arXiv 1606.08415).

    Phi is the distribution function of the normal distribution, phi its density.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        distance, tail = _tail(x.float())
        return (x.float().clamp(min=0) - distance * tail).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        distance, tail = _tail(x.float())
        below = tail * polynomial(NORMAL_TAIL_SLOPE, distance)  # the slope at -|x|; the slope at |x| is 1 - below
        return (grad_y.float() * torch.where(x < 0, below, 1 - below)).to(x.dtype)


def _tail(x: Tensor) -> tuple[Tensor, Tensor]:
    """(|x| clamped to the end of the fitted tail, the probability of the normal distribution beyond it), in fp32."""
    distance = x.abs().clamp(max=NORMAL_TAIL_END)
    return distance, torch.exp2(polynomial(NORMAL_TAIL, distance))
