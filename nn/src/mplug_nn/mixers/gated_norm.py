"""Norms of a mixer's output that a gate multiplies. K width of a head, or of a group of channels."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, sigmoid, silu

Order = Literal["norm, silu", "norm, sigmoid", "silu, norm"]
"""What comes first: the norm, or the gate with its activation."""


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, order: Order) -> Tensor:
    """An RMSNorm over the last dimension of x [..., K], with a gate [..., K] -> [..., K], computed in at least fp32.

    'norm, silu': weight norm(x) silu(gate), as in gated delta nets; 'norm, sigmoid': weight norm(x) sigmoid(gate)
    (KDA); 'silu, norm': weight norm(x silu(gate)) (Mamba-2). The weight broadcasts.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y, g = x.to(wide), gate.to(wide)
    if order == "silu, norm":
        return (rms_norm(y * silu(g), y.shape[-1:], None, eps) * weight.to(wide)).to(x.dtype)
    normed = rms_norm(y, y.shape[-1:], None, eps) * weight.to(wide)
    return (normed * (silu(g) if order == "norm, silu" else sigmoid(g))).to(x.dtype)


def unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x [..., K] / sqrt(|x|² + eps), in at least fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * (wide.square().sum(dim=-1, keepdim=True) + eps).rsqrt()
