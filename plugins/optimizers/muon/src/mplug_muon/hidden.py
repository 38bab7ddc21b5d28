"""Muon's update of hidden matrices. O rows, I columns, N matrices of one shape."""

from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import Piece, StepScalars
from mplug_muon.polynomials import flops, orthogonalized, precision
from mplug_muon.routing import is_hidden_matrix

if TYPE_CHECKING:
    from mplug import Assembler, Placement
    from mplug_matrices import Block
    from mplug_muon.config import MuonConfig


class HiddenMatrices:
    """Advances the momentum element by element; the owner of each matrix orthogonalises it.

    Gradients are scratch memory. The momentum is a running mean, as in torch.optim.Muon. A running sum would give the
    same orthogonalised update.
    """

    def __init__(self, pieces: list[Piece], assembler: "Assembler", config: "MuonConfig") -> None:
        self._config, run = config, assembler.run

        def is_hidden(placement: "Placement") -> bool:
            return is_hidden_matrix(placement.parameter, config.tables)

        self._matrices = assembler.matrices(
            is_hidden,
            partial(flops, num_iterations=config.num_iterations),
            precision(run.precision.master_dtype, run.device),
            config.separate,
        )
        self._masters = {piece.name: piece.master for piece in pieces}
        self._gradients = {piece.name: piece.gradient for piece in pieces}
        self._decayed = [piece.master for piece in pieces if piece.parameter.decays]
        self._momenta = {piece.name: torch.zeros_like(piece.master) for piece in pieces}

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        skipped = scalars.skip > 0
        ahead = self._advance(scalars.scale, skipped)
        if self._decayed:
            factor = (1 - scalars.lr.double() * scalars.weight_decay.double()).masked_fill(skipped, 1.0)
            torch._foreach_mul_(self._decayed, factor.to(self._decayed[0].dtype))
        lr = scalars.lr.masked_fill(skipped, 0.0).double()
        for shape, targets, values in self._matrices.update(ahead, self._masters, self._orthogonalized):
            torch._foreach_mul_(values, (lr * scale_of(shape, self._config.scale)).to(values[0].dtype))
            torch._foreach_sub_(targets, values)

    def _advance(self, scale: Tensor, skipped: Tensor) -> dict[str, Tensor]:
        """m <- momentum m + (1 - momentum) g; the result is m, or with Nesterov momentum m + (1 - momentum) g.

        In a skipped step gradients count as zeros, whatever they are, and no momentum changes.
        """
        if not self._momenta:
            return {}
        momentum, momenta, gradients = self._config.momentum, [*self._momenta.values()], [*self._gradients.values()]
        weight = momenta[0].new_full((), 1 - momentum).masked_fill(skipped, 0.0)
        torch._foreach_mul_(gradients, scale)
        for mean, gradient in zip(momenta, gradients, strict=True):
            mean.lerp_(gradient.masked_fill_(skipped, 0.0), weight)
        if not self._config.nesterov:
            return self._momenta
        torch._foreach_lerp_(gradients, momenta, momentum)
        return self._gradients

    def _orthogonalized(self, _: "Sequence[Block]", x: Tensor) -> Tensor:
        return orthogonalized(x, self._config.iteration, self._config.num_iterations)

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live momentum of a piece, under torch's name."""
        return {"momentum_buffer": self._momenta[piece.name]}


def scale_of(shape: Sequence[int], scale: str) -> float:
    """The factor of the update of a matrix of a shape (O, I): that of the whole matrix, however ranks cut it."""
    rows, columns = shape
    factors = {
        "original": sqrt(max(1, rows / columns)),
        "match_rms_adamw": 0.2 * sqrt(max(rows, columns)),
        "spectral": sqrt(max(rows, columns)),
        "unit_rms_norm": sqrt(rows / columns),
    }
    return factors[scale]
