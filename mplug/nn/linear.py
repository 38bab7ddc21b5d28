"""A linear layer whose matrix products and collectives are slots."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug.nn.sink import Weights, add_product, zero_if_stale
from mplug.nn.slot_buffers import held


def _forward(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def _dgrad(grad_y: Tensor, weight: Tensor) -> Tensor:
    return grad_y @ weight


def _wgrad(grad_y: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    if main_grad is None:
        return _rows(grad_y).t() @ _rows(x)
    add_product(main_grad, torch.zeros((), dtype=torch.bool, device="cpu"), _rows(grad_y).t(), _rows(x))
    return None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class Gemm:
    """The three matrix products of a linear layer: the content of the slot `Linear.gemm`.

    `forward(x [..., I], weight [O, I])` returns x weightᵀ [..., O]. `dgrad(grad_y, weight)` returns grad_y weight [...,
    I]. `wgrad(grad_y, x, main_grad)` adds grad_yᵀ x to `main_grad` [O, I], in the dtype of `main_grad`, and returns
    None. If `main_grad` is None, it returns grad_yᵀ x.

    If the offer declares buffers (`Offer.buffers`), each product has a further keyword argument `buffers`, a mapping
    from their names to tensors. A product that is the default of this class does not receive it.
    """

    forward: Callable[..., Tensor] = _forward
    dgrad: Callable[..., Tensor] = _dgrad
    wgrad: Callable[..., Tensor | None] = _wgrad


PLAIN = Gemm()
NOTHING: Mapping[str, Any] = {}


class _Product(torch.autograd.Function):
    """y = x Wᵀ; backward: grad_x = grad_y W, and grad_yᵀ x is added directly to the weight's gradient sink.

    The sink's buffer is an argument that backward mutates. Such a mutation can be traced; a Python call to the sink
    cannot.
    """

    @staticmethod
    def forward(ctx, x, value, main_grad, stale, gemm):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, value)
        ctx.main_grad, ctx.stale, ctx.gemm = main_grad, stale, gemm
        return gemm.forward(x, value)

    @staticmethod
    def backward(ctx, grad_y):  # type: ignore[no-untyped-def]
        x, value = ctx.saved_tensors
        grad_x = ctx.gemm.dgrad(grad_y, value) if ctx.needs_input_grad[0] else None
        weight = Weights(value, ctx.main_grad, ctx.stale)
        grad_weight = weight_gradient(grad_y, x, weight, ctx.gemm) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None, None


class _BufferedProduct(torch.autograd.Function):
    """`_Product` with a supplier that keeps buffers: tensors [...], named in `names`, that it may write in both passes.

    They are arguments of the function, like the weight's gradient sink, so that the writes can be traced.
    """

    @staticmethod
    def forward(ctx, x, value, main_grad, stale, gemm, names, *buffers):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, value)
        ctx.main_grad, ctx.stale, ctx.gemm, ctx.names, ctx.buffers = main_grad, stale, gemm, names, buffers
        return gemm.forward(x, value, **_given(gemm.forward, _forward, names, buffers))

    @staticmethod
    def backward(ctx, grad_y):  # type: ignore[no-untyped-def]
        x, value = ctx.saved_tensors
        gemm, names, buffers = ctx.gemm, ctx.names, ctx.buffers
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = gemm.dgrad(grad_y, value, **_given(gemm.dgrad, _dgrad, names, buffers))
        if ctx.needs_input_grad[1]:
            named = _given(gemm.wgrad, _wgrad, names, buffers)
            grad_weight = weight_gradient(grad_y, x, Weights(value, ctx.main_grad, ctx.stale), gemm, named)
        return grad_x, grad_weight, None, None, None, None, *(None for _ in buffers)


def _given(
    product: Callable[..., Any], default: Callable[..., Any], names: tuple[str, ...], buffers: tuple[Tensor, ...]
) -> dict[str, Any]:
    """The keyword arguments of one of a supplier's products; none if the product is the default."""
    return {} if product is default else {"buffers": dict(zip(names, buffers, strict=True))}


def weight_gradient(
    grad_y: Tensor, x: Tensor, weight: Weights, gemm: Gemm = PLAIN, named: Mapping[str, Any] = NOTHING
) -> Tensor | None:
    """grad_yᵀ x [O, I] of grad_y [..., O] and x [..., I]: added to the weight's sink, or returned if it has none.

    `named` are further keyword arguments of `gemm.wgrad`.
    """
    if weight.main_grad is None or weight.stale is None:
        return gemm.wgrad(grad_y, x, weight.main_grad, **named)
    if gemm.wgrad is _wgrad:
        add_product(weight.main_grad, weight.stale, _rows(grad_y).t(), _rows(x))
        return None
    zero_if_stale(weight.main_grad, weight.stale)
    return gemm.wgrad(grad_y, x, weight.main_grad, **named)


def multiply(x: Tensor, weight: Weights, gemm: Gemm, buffers: Mapping[str, Tensor] = NOTHING) -> Tensor:
    """x [..., I] -> x weightᵀ [..., O], with the products of `gemm`; the weight's gradient goes to its sink.

    `buffers` are those that the supplier of `gemm` declares.
    """
    y: Tensor
    if buffers:
        y = _BufferedProduct.apply(x, *weight, gemm, tuple(buffers), *buffers.values())  # type: ignore[no-untyped-call]
    else:
        y = _Product.apply(x, *weight, gemm)  # type: ignore[no-untyped-call]
    return y


def _identity(x: Tensor) -> Tensor:
    """The identity, without a collective: the default of the slots `Linear.gather` and `Linear.scatter`.

    `Linear.gather` runs before the product: x [..., in] -> the product's input [..., in]. `Linear.scatter` runs after
    it: the product's y [..., out] -> [..., out].
    """
    return x


class Linear(nn.Module):
    """y = x Wᵀ + b, with weight [out, in] as in torch.

    `gather` runs before the product and `scatter` after it. Both are identities until a strategy puts its collective
    there.
    """

    SLOTS = ("Linear.gemm", "Linear.gather", "Linear.scatter")
    BUFFERED_SLOTS = ("Linear.gemm",)
    slot_buffers: Mapping[str, tuple[str, ...]] = NOTHING
    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.gemm = PLAIN
        self.gather = self.scatter = _identity

    def product(self, x: Tensor) -> Tensor:
        """x [..., in] -> x Wᵀ [..., out], without the bias, for callers that fuse the bias."""
        return self.scatter(self.multiply(self.gather(x)))

    def multiply(self, x: Tensor) -> Tensor:
        """The output [..., in] of `gather` -> x Wᵀ [..., out], the input of `scatter`."""
        buffers = held(self, "Linear.gemm") if self.slot_buffers else NOTHING
        return multiply(x, Weights.of(self.weight), self.gemm, buffers)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        y = self.product(x)
        return y if self.bias is None else y + self.bias
