"""Selects the implementation that updates a list of pieces."""

from typing import TYPE_CHECKING

import torch

from mplug import Optimizer, Piece, triton_builds
from mplug_adamw.fused import FusedAdamW

if TYPE_CHECKING:
    from mplug_adamw.config import AdamWConfig


def optimizer_of(pieces: list[Piece], config: "AdamWConfig") -> Optimizer:
    """One pass where the kernel can take all pieces and Triton can build it; torch's implementation elsewhere."""
    if pieces and all(map(_fits, pieces)) and triton_builds():
        from mplug_adamw.one_pass import OnePassAdamW  # imports Triton

        return OnePassAdamW(pieces, config)
    return FusedAdamW(pieces, config)


def _fits(piece: Piece) -> bool:
    tensors = [tensor for tensor in (piece.master, piece.gradient, piece.weight) if tensor is not None]
    in_bf16 = piece.weight is None or piece.weight.dtype is torch.bfloat16
    in_bf16 &= piece.gradient.dtype in (torch.float32, torch.bfloat16)
    return in_bf16 and all(tensor.device.type == "cuda" and tensor.is_contiguous() for tensor in tensors)
