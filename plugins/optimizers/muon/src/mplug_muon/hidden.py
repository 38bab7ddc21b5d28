"""Muon's update of hidden matrices. O rows, I columns, N matrices of one shape."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import Piece, StepScalars
from mplug_muon.newton_schulz import orthogonalized

if TYPE_CHECKING:
    from mplug_muon.config import MuonConfig

BATCH = 1 << 25
"""Maximum elements orthogonalised together: small matrices need batching to fill a GPU, large ones cost memory."""


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape: views [O, I] of masters, and views [O, I] of the tensors to orthogonalise (`ahead`)."""

    masters: list[Tensor]
    ahead: list[Tensor]

    def factor(self, scale: str) -> float:
        """The factor of the update of a matrix of this shape."""
        rows, columns = self.masters[0].shape
        return 0.2 * sqrt(max(rows, columns)) if scale == "match_rms_adamw" else sqrt(max(1, rows / columns))


class HiddenMatrices:
    """Updates the momentum per piece, then orthogonalises per matrix; it overwrites gradients as scratch memory.

    The momentum is a running mean, as in torch.optim.Muon. A running sum would give the same orthogonalised update.
    """

    def __init__(self, pieces: list[Piece], rank: int, config: "MuonConfig") -> None:
        self._config = config
        self._gradients = [piece.gradient for piece in pieces]
        self._decayed = [piece.master for piece in pieces if piece.parameter.decays]
        self._momenta = {piece.name: torch.zeros_like(piece.master) for piece in pieces}
        ahead = {piece.name: piece.gradient if config.nesterov else self._momenta[piece.name] for piece in pieces}
        pairs = [pair for piece in pieces for pair in zip(*_matrices(piece, rank, ahead[piece.name]), strict=True)]
        self._batches = list(batches(pairs, BATCH))

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        if not self._batches:
            return
        skipped = scalars.skip > 0
        self._advance(scalars.scale, skipped)
        if self._decayed:
            factor = (1 - scalars.lr * scalars.weight_decay).masked_fill(skipped, 1.0)
            torch._foreach_mul_(self._decayed, factor)
        for batch in self._batches:
            update = orthogonalized(torch.stack(batch.ahead), self._config.num_iterations)  # [N, O, I]
            masters = batch.masters[0].dtype
            update = update.to(masters, memory_format=torch.contiguous_format)  # the memory layout of masters
            update *= scalars.lr * batch.factor(self._config.scale)
            torch._foreach_sub_(batch.masters, update.masked_fill_(skipped, 0.0).unbind())

    def _advance(self, scale: Tensor, skipped: Tensor) -> None:
        """m <- momentum m + (1 - momentum) g; then, with Nesterov, g <- momentum m + (1 - momentum) g."""
        momentum, momenta = self._config.momentum, list(self._momenta.values())
        torch._foreach_mul_(self._gradients, scale)
        for mean, gradient in zip(momenta, self._gradients, strict=True):
            torch.where(skipped, mean, torch.lerp(mean, gradient, 1 - momentum), out=mean)
        if self._config.nesterov:
            torch._foreach_lerp_(self._gradients, momenta, momentum)

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live momentum of a piece, under torch's name."""
        return {"momentum_buffer": self._momenta[piece.name]}


def _matrices(piece: Piece, rank: int, ahead: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Views [O, I] of the piece's master and of `ahead`, one per segment of a fused weight and per expert."""
    masters, aheads = list[Tensor](), list[Tensor]()
    for box in piece.placement.boxes(rank):
        where = tuple(slice(start, start + length) for start, length in zip(box.offset, box.shape, strict=True))
        masters += _unstacked(piece.master[where])
        aheads += _unstacked(ahead[where])
    return masters, aheads


def _unstacked(x: Tensor) -> list[Tensor]:
    """x [..., O, I] as views [O, I]."""
    return [x] if x.dim() == 2 else [matrix for part in x.unbind() for matrix in _unstacked(part)]


def batches(pairs: list[tuple[Tensor, Tensor]], limit: int) -> Iterator[Batch]:
    """Batches of pairs (master, ahead) of one shape, with at most `limit` elements or one matrix."""
    by_shape = defaultdict[torch.Size, list[tuple[Tensor, Tensor]]](list)
    for pair in pairs:
        by_shape[pair[0].shape].append(pair)
    for shape, same_shape in by_shape.items():
        size = max(1, limit // shape.numel())
        for start in range(0, len(same_shape), size):
            masters, ahead = zip(*same_shape[start : start + size], strict=True)
            yield Batch(list(masters), list(ahead))
