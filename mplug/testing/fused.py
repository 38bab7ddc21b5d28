"""Linear layers whose input a norm or an activation computes, as trials of suppliers call them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mplug.nn import FusedProduct, Inputs, Linear, Narrow, Operand, Prologue
from mplug.nn.mlp import activation
from mplug.nn.norm import norm_residual
from mplug.nn.prologue import NORM_PRODUCT, SEPARATE

KINDS = {"Linear.norm_product": "layernorm", "Linear.activation_product": "gelu"}
"""The prologue of each slot in trials of one kind only."""


def prologue_of(slot: str) -> Prologue:
    """The prologue of trials of a slot."""
    return Prologue(KINDS[slot], 1e-5)


def inputs_of(slot: str, x: Tensor) -> Inputs:
    """What the prologue of a slot reads in trials: x [..., D] and, for a norm, weights of ones."""
    return Inputs(x, weight=x.new_ones(x.shape[-1])) if slot == NORM_PRODUCT else Inputs(x)


def composed(prologue: Prologue, inputs: Inputs, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """(the product of the prologue's result, the residual stream of a norm), in plain torch."""
    x, residual, norm_weight, bias = inputs
    kind: Any = prologue.kind
    if norm_weight is None:
        return F.linear(activation(x, bias, kind), weight), None
    normed, summed = norm_residual(x, residual, norm_weight, bias, prologue.eps, kind)
    return F.linear(normed, weight), summed


class FusedLinear(Linear):
    """A linear layer without a bias after the prologue of one of its fused slots."""

    def __init__(self, in_features: int, out_features: int, slot: str) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.slot = slot

    def forward(self, x: Any) -> Tensor:
        """x [..., in], which the prologue reads -> [..., out]."""
        y = self.fused(prologue_of(self.slot), inputs_of(self.slot, x))
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
        operand, narrow, prologue = Operand(weight, product.cast(weight, buffers)), Narrow(), prologue_of(self.slot)
        _, _, saved = product.forward(prologue, inputs_of(self.slot, x), operand, narrow, buffers)
        beside = torch.zeros_like(x) if self.slot == NORM_PRODUCT else None
        _, wanted = product.dgrad(prologue, upstream, beside, operand, saved, narrow, buffers)
        product.wgrad(wanted, None, narrow, buffers)
