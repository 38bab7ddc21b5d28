"""The supplier of `MLP.core`. T tokens, D embed, F mlp."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mplug_nn import MLPCore, Weights, fake, operator
from mplug_products import Later, hand_out
from mplug_quack.dense import PRODUCTS
from mplug_quack.rows import ALIGNED, aligned_rows

KINDS = ("gelu", "gelu_tanh")


def core(
    x: Tensor,
    up: Weights,
    bias: Tensor | None,
    down: Weights,
    kind: str,
    composed: Callable[[Tensor], Tensor],
    products: str = "fused",
) -> Tensor:
    """act(x upᵀ + bias) downᵀ, [..., D] -> [..., D]; up [F, D], bias [F], down [D, F].

    `products` is the value of `kernels.quack.products`. If ALIGNED does not divide F, the width on this rank, it calls
    `composed`, the composition of the narrower slots.
    """
    return delayed(x, up, bias, down, kind, composed, None, None, products)


def delayed(
    x: Tensor,
    up: Weights,
    bias: Tensor | None,
    down: Weights,
    kind: str,
    composed: Callable[[Tensor], Tensor],
    up_later: Later | None,
    down_later: Later | None,
    products: str = "fused",
) -> Tensor:
    """`core`, whose backward hands out the operands of weight gradients that are computed later (`MLPCore`)."""
    width, dim = up.values.shape
    if width % ALIGNED:
        return composed(x)
    if up_later is not None and up_later.declare is not None:
        rows = x.flatten(0, -2)
        up_later.declare((rows.new_empty(len(rows), width), rows))
    if down_later is not None and down_later.declare is not None:
        rows = x.new_empty(x.numel() // dim, dim)
        down_later.declare((rows, rows.new_empty(len(rows), width)))
    taps = [() if later is None else later.taps for later in (up_later, down_later)]
    weights = [
        one if later is None else one._replace(values=one.values.detach())
        for one, later in ((up, up_later), (down, down_later))
    ]
    call = x, bias, kind, products, *map(len, taps), *weights[0], *weights[1], *taps[0], *taps[1]
    y: Tensor = _MLP.apply(*call)  # type: ignore[no-untyped-call]
    return y


CORES = {name: MLPCore(partial(core, products=name), delayed=partial(delayed, products=name)) for name in PRODUCTS}
"""By the values of `kernels.quack.products`."""


class _MLP(torch.autograd.Function):
    """h = x upᵀ + bias, a = act(h), y = a downᵀ; x and y [..., D], h and a [T, F]. Saves x and h.

    Backward: one kernel computes grad_h = act'(h) (grad_y down) and recomputes a. Then follow the weights' gradients,
    which go into their sinks, and grad_x = grad_h up. If a weight has taps, they receive the operands of its gradient.
    """

    @staticmethod
    def forward(ctx, x, bias, kind, products, up_taps, down_taps, *tensors):  # type: ignore[no-untyped-def]
        up, down = Weights(*tensors[:3]), Weights(*tensors[3:6])
        h, a = activated(x.flatten(0, -2), up.values, bias, kind)
        ctx.save_for_backward(x, h, up.values, down.values)
        ctx.kind, ctx.bias, ctx.sinks = kind, None if bias is None else bias.dtype, (up[1:], down[1:])
        ctx.taps, ctx.products = (up_taps, down_taps), products
        return PRODUCTS[products].multiply(a, down.values, True).view(x.shape)

    @staticmethod
    def backward(ctx, grad_y):  # type: ignore[no-untyped-def]
        x, h, *values = ctx.saved_tensors
        up, down = (Weights(one, *sink) for one, sink in zip(values, ctx.sinks, strict=True))
        grad_y = grad_y.flatten(0, -2)
        grad_h, a = gradient(grad_y, down.values, h, ctx.kind)
        needs_gradient = ctx.needs_input_grad  # (x, bias, two words, two numbers, up, up's two of the sink, down, ...)
        multiply, gradient_of = PRODUCTS[ctx.products]
        grad_down = gradient_of(grad_y, a, down) if needs_gradient[9] else None
        grad_up = gradient_of(grad_h, x, up) if needs_gradient[6] else None
        grad_x = multiply(grad_h, up.values, False).view(x.shape) if needs_gradient[0] else None
        grad_bias = None if ctx.bias is None else grad_h.sum(0, dtype=torch.float32).to(ctx.bias)
        of_taps = hand_out((grad_h, x.flatten(0, -2)), ctx.taps[0]) + hand_out((grad_y, a), ctx.taps[1])
        return grad_x, grad_bias, *[None] * 4, grad_up, None, None, grad_down, None, None, *of_taps


# Operators that a compiler does not look into. QuACK is imported when they run, not when they are declared.


@operator("mplug_quack::activated")
def activated(x: Tensor, up: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """x [T, D], up [F, D], bias [F] -> h = x upᵀ + bias and act(h), both [T, F]."""
    from mplug_quack.epilogues import UP

    h, a = _like(x, up.shape[0])
    beside = {} if bias is None else {"bias": bias[None]}
    UP[kind, bias is not None](aligned_rows(x), aligned_rows(up).t(), out={"D": h, "y": a}, tuned=False, **beside)
    return h, a


@fake("mplug_quack::activated")
def _(x: Tensor, up: Tensor, bias: Any, kind: str) -> tuple[Tensor, Tensor]:
    return _like(x, up.shape[0])


@operator("mplug_quack::gradient")
def gradient(grad_y: Tensor, down: Tensor, h: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """grad_y [T, D], down [D, F], h [T, F] -> the gradient of h and act(h), both [T, F]."""
    from mplug_quack.epilogues import DOWN

    grad_h, a = _like(grad_y, down.shape[1])
    DOWN[kind](aligned_rows(grad_y), aligned_rows(down), aligned_rows(h), out={"D": grad_h, "y": a}, tuned=False)
    return grad_h, a


@fake("mplug_quack::gradient")
def _(grad_y: Tensor, down: Tensor, h: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return _like(grad_y, down.shape[1])


def _like(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), width), x.new_empty(len(x), width)
