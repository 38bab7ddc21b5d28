"""The update of `Descent`."""

from typing import Literal

import torch
from torch import Tensor

from mplug import Optimizer, Piece, StepScalars


class Momentum(Optimizer):
    """b <- momentum b + g, then w <- w - lr (b + decay w)."""

    needs: Literal["elements"] = "elements"

    def __init__(self, pieces: list[Piece], momentum: float) -> None:
        self.pieces, self.momentum = pieces, momentum
        self.sums = {piece.name: torch.zeros_like(piece.master) for piece in pieces}

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update the master of every piece. If `skip` is 1, nothing changes."""
        skipped = scalars.skip.bool()
        for piece in self.pieces:
            total = self.sums[piece.name]
            decay = scalars.weight_decay if piece.parameter.decays else 0.0
            new = self.momentum * total + piece.gradient * scalars.scale
            master = piece.master - scalars.lr * (new + decay * piece.master)
            total.copy_(torch.where(skipped, total, new))
            piece.master.copy_(torch.where(skipped, piece.master, master))

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live sum of a piece."""
        return {"momentum": self.sums[piece.name]}
