"""Norms of a mixer's output that a gate multiplies. B batch, S sequence, G groups, K width of a head, or of a group."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, sigmoid, silu

from mplug.model.slots.declaration import Slot


def own_squares(squares: Tensor, num_groups: int) -> Tensor:
    """The default of the slot `Mamba2.squares`: the identity, for a process that has whole groups of heads.

    squares [B, S, G, 1], in at least fp32: for each group of heads of this process, the sum of the squares of what the
    norm divides; `num_groups` are those of the model -> the sum over all heads of the group. A strategy that divides
    the heads of a group among ranks adds up their sums, and gradients pass through it.
    """
    return squares


SQUARES = Slot("Mamba2.squares", "group_norm", own_squares)

Squares = Callable[[Tensor, int], Tensor]
"""The content of the slot `Mamba2.squares`."""
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


def gated_group_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int, width: int, total: Squares
) -> Tensor:
    """An RMSNorm of x silu(gate) over groups of channels, of which this process may have a part (Mamba-2).

    x and gate [B, S, G, K], weight [G, K]; `width` are the channels of a whole group, and `total` is the slot
    `Mamba2.squares` -> [B, S, G, K] in the dtype of x, computed in at least fp32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) * silu(gate.to(wide))
    mean = total(y.square().sum(dim=-1, keepdim=True), num_groups) / width
    return (y * (mean + eps).rsqrt() * weight.to(wide)).to(x.dtype)


def unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x [..., K] / sqrt(|x|² + eps), in at least fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * (wide.square().sum(dim=-1, keepdim=True) + eps).rsqrt()
