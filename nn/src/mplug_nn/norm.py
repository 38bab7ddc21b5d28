"""Normalisation, fused with the residual addition before it."""

from collections.abc import Container
from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug.layout.inits import ZEROS, Entries, Inits
from mplug.layout.plan import Init, Parameter
from mplug.model.slots.declaration import Slot
from mplug_nn.named import NeedsOf
from mplug_nn.norm_functions import NORMS

Kind = str
"""A name of the open list `mplug.norms`: 'layernorm', 'rmsnorm', 'offset_rmsnorm', ..."""


def norm_residual(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: Kind
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), both [..., D]: the default of the slot `Norm.norm_residual`.

    Without a residual, the sum is x. A site whose kind is neither 'layernorm' nor 'rmsnorm' needs it by name:
    'offset_rmsnorm norm'.
    """
    summed = x if residual is None else x + residual
    return NORMS[kind].compute(summed, weight, bias, eps), summed


NORM_RESIDUAL = Slot("Norm.norm_residual", "norm", norm_residual, serves=NeedsOf(NORMS))


class Norm(nn.Module):
    """A norm over the last dimension. `kind` is a name of the open list of norms."""

    SLOTS: ClassVar[tuple[Slot, ...]] = (NORM_RESIDUAL,)
    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dim: int, kind: Kind, eps: float = 1e-5, bias: bool = False) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.initial = NORMS.load(kind).initial
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.norm_residual = norm_residual

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters, for a norm of the residual stream."""
        bias = {} if self.bias is None else {"bias": Parameter(("embed",), ZEROS)}
        return {"weight": Parameter(("embed",), Init("constant", value=self.initial)), **bias}

    def needs(self, slot: str, entries: Container[str]) -> frozenset[str]:
        """What a supplier of the slot must offer here."""
        return NORMS.needs(self.kind)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [..., D] and the residual stream [..., D] to add it to, or None -> (the normalised sum, the sum)."""
        return self.norm_residual(x, residual, self.weight, self.bias, self.eps, self.kind)
