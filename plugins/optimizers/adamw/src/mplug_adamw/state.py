"""AdamW's state of a piece, under torch's names, as checkpoints hold it."""

import torch
from torch import Tensor

from mplug import Piece


class States:
    """Both moments and the number of updates of every piece; all zeros before the first step.

    `steps` [P], fp32, holds the number of updates of all P pieces, so that one operation counts a step.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        device = pieces[0].master.device if pieces else None
        self.steps = torch.zeros(len(pieces), device=device)
        self._of = {
            piece.name: {
                "step": step,
                "exp_avg": torch.zeros_like(piece.master),
                "exp_avg_sq": torch.zeros_like(piece.master),
            }
            for piece, step in zip(pieces, self.steps.unbind(), strict=True)
        }

    def of(self, piece: Piece) -> dict[str, Tensor]:
        """The live `step` [], `exp_avg` and `exp_avg_sq` of a piece."""
        return dict(self._of[piece.name])
