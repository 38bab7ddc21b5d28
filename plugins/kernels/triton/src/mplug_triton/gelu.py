"""Exact GELU for compiled units: the supplier of `MLP.activation`.

On a GPU it is torch's erf, not memory, that makes GELU slow; this one's is a polynomial. It is traced, not launched:
the compiler fuses it with what is around it, and computes it again where a backward product needs it.
"""

from typing import Any

import torch
from torch import Tensor

from mplug.nn.mlp import Kind
from mplug.nn.mlp import activation as composition

SCALE = 0.3275911
COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Of the highest power first. Abramowitz and Stegun, 7.1.26: with t = 1 / (1 + SCALE z) and z >= 0,
erf z = 1 - (a5 t^5 + ... + a1 t) exp(-z^2), off by 1.5e-7 at most."""


def activation(x: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    """x [..., F] (swiglu: [..., 2F]) plus bias -> [..., F] in the type of x.

    'gelu' is computed in fp32, and value and slope are off by 6e-7 at most before they are rounded to the type of x;
    other kinds are the composition's.
    """
    if kind != "gelu":
        return composition(x, bias, kind)
    y: Tensor = _GELU.apply(x if bias is None else x + bias)  # type: ignore[no-untyped-call]
    return y


class _GELU(torch.autograd.Function):
    """y = x Phi(x), grad_x = (Phi(x) + x phi(x)) grad_y, where Phi is the normal distribution, phi its density.

    Only x is kept. (arXiv 1606.08415.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        below, _ = _normal(x.float())
        return (x.float() * below).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        below, density = _normal(x.float())
        return (grad_y.float() * (below + x.float() * density)).to(x.dtype)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The standard normal distribution Phi and its density phi at x, in fp32."""
    bell = (-0.5 * x * x).exp()  # 0 where x * x overflows
    t = 1 / (1 + (SCALE * 0.5**0.5) * x.abs())
    series = COEFFICIENTS[0] * t
    for coefficient in COEFFICIENTS[1:]:
        series = (series + coefficient) * t
    tail = 0.5 * series * bell  # of the side on which x is
    return torch.where(x < 0, tail, 1 - tail), bell * (2 * torch.pi) ** -0.5
