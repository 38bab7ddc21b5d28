"""Linear layers whose input a norm or an activation computes, as trials of suppliers call them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mplug_nn import FusedProduct, Inputs, Linear, Narrow, Operand, Prologue, Upstream
from mplug_nn.activations import ACTIVATIONS, is_gated
from mplug_nn.mlp import activation
from mplug_nn.norm import norm_residual
from mplug_nn.norm_functions import NORMS
from mplug_nn.prologue import ACTIVATION_PRODUCT, NORM_PRODUCT, SEPARATE

KINDS: dict[str, tuple[str, ...]] = {
    NORM_PRODUCT: tuple(NORMS.list.own),
    ACTIVATION_PRODUCT: tuple(ACTIVATIONS.list.own),
}
"""The prologues of each slot; a trial of one kind only takes the first that the supplier computes."""


def kind_of(slot: str, computes: Callable[[str], bool]) -> str:
    """The kind of prologue in trials of a slot: the first that a supplier computes, or the first of all.

    The empty string for slots without a prologue.
    """
    kinds = KINDS.get(slot)
    return next(filter(computes, kinds), kinds[0]) if kinds else ""


def inputs_of(prologue: Prologue, x: Tensor) -> Inputs:
    """What a prologue reads in trials, from x [..., D]: it and weights of ones for a norm, twice it if it is gated."""
    if prologue.kind in NORMS.list.own:
        return Inputs(x, weight=x.new_ones(x.shape[-1]))
    return Inputs(torch.cat((x, x), -1) if is_gated(prologue.kind) else x)


def composed(prologue: Prologue, inputs: Inputs, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """(the product of the prologue's result, the residual stream of a norm), in plain torch."""
    x, residual, norm_weight, bias = inputs
    kind: Any = prologue.kind
    if norm_weight is None:
        return F.linear(activation(x, bias, kind), weight), None
    normed, summed = norm_residual(x, residual, norm_weight, bias, prologue.eps, kind)
    return F.linear(normed, weight), summed


class FusedLinear(Linear):
    """A linear layer without a bias after the prologue of one of its fused slots; `kind`: the first of KINDS."""

    def __init__(self, in_features: int, out_features: int, slot: str, kind: str = "") -> None:
        super().__init__(in_features, out_features, bias=False)
        self.slot, self.prologue = slot, Prologue(kind or KINDS[slot][0], 1e-5)

    def forward(self, x: Any) -> Tensor:
        """x [..., in], which the prologue reads -> [..., out]."""
        y = self.fused(self.prologue, inputs_of(self.prologue, x))
        out: Tensor = y[0] + 0 * y[1].sum() if self.slot == NORM_PRODUCT else y
        return out

    def both(self, prologue: Prologue, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """(the product, the residual stream of a norm), by the supplier or in plain torch."""
        if self.content[0] is SEPARATE or not isinstance(self.content[0], FusedProduct):
            return composed(prologue, inputs, self.weight)
        y = self.fused(prologue, inputs)
        return y if isinstance(y, tuple) else (y, None)

    def parts_once(
        self, product: FusedProduct, operands: tuple[Tensor, Tensor, Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        """Call the three parts of a supplier with x, a weight and the gradient of the product."""
        x, weight, upstream = operands
        operand, narrow, prologue = Operand(weight, product.cast(weight, buffers)), Narrow(), self.prologue
        _, saved = product.forward((prologue, inputs_of(prologue, x)), operand, narrow, buffers)
        beside = torch.zeros_like(x) if self.slot == NORM_PRODUCT else None
        gradients = Upstream(prologue, upstream, beside)
        _, wanted = product.dgrad(gradients, operand, saved, narrow, buffers, True)
        product.wgrad(wanted, None, narrow, buffers)
