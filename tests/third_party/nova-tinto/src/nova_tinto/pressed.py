"""Products of fp32 operands that are rounded to fewer bits of significand, to the nearest, ties to even."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mplug_nn import Gemm

KEPT = 24
"""Bits of significand of fp32, the implicit leading one included."""


def pressed(x: Tensor, bits: int) -> Tensor:
    """x in fp32, rounded to `bits` bits of significand. Rounding adds to the integer that has the bits of x."""
    dropped = KEPT - bits
    if not dropped:
        return x
    integer = x.contiguous().view(torch.int32)
    odd = (integer >> dropped) & 1
    rounded = (integer + ((1 << (dropped - 1)) - 1) + odd) & -(1 << dropped)
    return rounded.view(torch.float32)


def _forward(x: Tensor, weight: Tensor, bits: int) -> Tensor:
    return F.linear(pressed(x, bits), pressed(weight, bits))


def _dgrad(grad_y: Tensor, weight: Tensor, bits: int) -> Tensor:
    return pressed(grad_y, bits) @ pressed(weight, bits)


def _wgrad(grad_y: Tensor, x: Tensor, main_grad: Tensor | None, bits: int) -> Tensor | None:
    product = pressed(grad_y, bits).flatten(0, -2).t() @ pressed(x, bits).flatten(0, -2)
    if main_grad is None:
        return product
    main_grad.add_(product)
    return None


def gemm_of(bits: int) -> Gemm:
    """The three products of a linear layer with operands of `bits` bits."""
    return Gemm(partial(_forward, bits=bits), partial(_dgrad, bits=bits), partial(_wgrad, bits=bits))
