"""Lion (algorithm 2 of arXiv 2302.06675) by torch's foreach operations."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import Optimizer, Piece, StepScalars

if TYPE_CHECKING:
    from mplug_lion.config import LionConfig

GROUP = 1 << 26
"""Maximum elements updated together: enough to fill a GPU, few enough to bound the memory of directions."""


class ForeachLion(Optimizer):
    """Updates pieces group by group; gradients are scratch memory, and directions are freed after each group."""

    def __init__(self, pieces: list[Piece], config: "LionConfig") -> None:
        self._config = config
        self._momenta = {piece.name: torch.zeros_like(piece.master) for piece in pieces}
        self._groups = list(groups(pieces, GROUP))

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        skipped = scalars.skip > 0
        kept = (1 - scalars.lr * scalars.weight_decay).masked_fill(skipped, 1.0)
        for pieces in self._groups:
            decayed = [piece.master for piece in pieces if piece.parameter.decays]
            if decayed:
                torch._foreach_mul_(decayed, kept)
            self._descend(pieces, scalars, skipped)

    def _descend(self, pieces: list[Piece], scalars: StepScalars, skipped: Tensor) -> None:
        """c = beta1 m + (1 - beta1) g, w <- w - lr sign(c), m <- beta2 m + (1 - beta2) g."""
        masters, gradients = [piece.master for piece in pieces], [piece.gradient for piece in pieces]
        momenta = [self._momenta[piece.name] for piece in pieces]
        torch._foreach_mul_(gradients, scalars.scale)
        directions = torch._foreach_lerp(momenta, gradients, 1 - self._config.beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(directions, scalars.lr)
        torch._foreach_lerp_(gradients, momenta, self._config.beta2)  # now the gradients hold the new momenta
        for direction, momentum, following in zip(directions, momenta, gradients, strict=True):
            direction.masked_fill_(skipped, 0.0)
            torch.where(skipped, momentum, following, out=momentum)
        torch._foreach_sub_(masters, directions)

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live momentum of a piece, under torch's name for a running mean of gradients."""
        return {"exp_avg": self._momenta[piece.name]}


def groups(pieces: list[Piece], limit: int) -> Iterator[list[Piece]]:
    """Groups of consecutive pieces with at most `limit` elements; a larger piece is a group of its own."""
    held: list[Piece] = []
    count = 0
    for piece in pieces:
        if held and count + piece.master.numel() > limit:
            yield held
            held, count = [], 0
        held.append(piece)
        count += piece.master.numel()
    if held:
        yield held
