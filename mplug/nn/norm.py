"""Normalisation, fused with the residual addition before it."""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug.layout.plan import Parameter
from mplug.nn.inits import ONES, ZEROS, Entries, Inits

Kind = Literal["layernorm", "rmsnorm"]


def norm_residual(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: Kind
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), both [..., D]: the default of the slot `Norm.norm_residual`.

    Without a residual, the sum is x.
    """
    summed = x if residual is None else x + residual
    if kind == "layernorm":
        return F.layer_norm(summed, weight.shape, weight, bias, eps), summed
    normed = F.rms_norm(summed, weight.shape, weight, eps)
    return (normed if bias is None else normed + bias), summed


class Norm(nn.Module):
    """LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467) over the last dimension."""

    SLOTS = ("Norm.norm_residual",)
    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dim: int, kind: Kind, eps: float = 1e-5, bias: bool = False) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.norm_residual = norm_residual

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the parameters, for a norm of the residual stream."""
        bias = {} if self.bias is None else {"bias": Parameter(("embed",), ZEROS)}
        return {"weight": Parameter(("embed",), ONES), **bias}

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [..., D] and the residual stream [..., D] to add it to, or None -> (the normalised sum, the sum)."""
        return self.norm_residual(x, residual, self.weight, self.bias, self.eps, self.kind)
