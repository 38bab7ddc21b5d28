"""The matrix products of a linear layer: the content of the slot `Linear.gemm`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mplug.tensors.sink import Weights, add_product, zero_if_stale

NOTHING: Mapping[str, Any] = {}


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


def arguments(product: Callable[..., Any], buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keyword arguments of one of a supplier's products: its buffers; none if it is a default of `Gemm`."""
    return {} if not buffers or product in (_forward, _dgrad, _wgrad) else {"buffers": buffers}
