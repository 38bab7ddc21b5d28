"""The optimizer that splits pieces between SOAP and AdamW."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import Optimizer, Parameter, Piece, ShapedState, StepScalars
from mplug_soap.rotated import RotatedMatrices
from mplug_updates import TorchOptimizer

if TYPE_CHECKING:
    from mplug import Assembler
    from mplug_soap.config import SOAPConfig

STACKS = ("expert", "every_expert")
"""Named axes along which separate matrices, or separate vectors (biases of experts), are stacked."""


def is_hidden_matrix(parameter: Parameter, tables: tuple[str, ...]) -> bool:
    """Whether a parameter maps hidden activations to hidden activations, unlike a table of separate vectors."""
    of_one = [dim for dim in parameter.dims if dim not in STACKS]
    return len(of_one) >= 2 and not parameter.axes & set(tables)


class SOAPAndAdamW(Optimizer):
    """Updates hidden matrices by SOAP, and everything else by AdamW with the same moments."""

    def __init__(self, pieces: list[Piece], assembler: "Assembler", config: "SOAPConfig") -> None:
        is_hidden = partial(is_hidden_matrix, tables=config.tables)
        hidden = [piece for piece in pieces if is_hidden(piece.parameter)]
        rest = [piece for piece in pieces if not is_hidden(piece.parameter)]
        matrices = assembler.matrices(
            lambda placement: is_hidden(placement.parameter), partial(flops, largest=config.largest_factor)
        )
        self._hidden = RotatedMatrices(hidden, assembler.run, matrices, config)
        settings = {"lr": torch.tensor(config.lr), "betas": (config.beta1, config.beta2), "eps": config.eps}
        self._rest = TorchOptimizer(rest, partial(torch.optim.AdamW, **settings, fused=True), _zeros)
        self._part_of = {piece.name: self._hidden if is_hidden(piece.parameter) else self._rest for piece in pieces}

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        self._hidden.step(scalars)
        self._rest.step(scalars)

    def state(self, piece: Piece) -> dict[str, Tensor | ShapedState]:
        """The live state of a piece: factors, bases and moments of the matrices that this rank owns, or moments."""
        return dict(self._part_of[piece.name].state(piece))


def flops(rows: int, columns: int, largest: int) -> float:
    """The FLOPs of a step for a matrix, without refreshes: two rotations there, one back, and both factors."""
    sides = [side for side in (rows, columns) if side <= largest]
    return sum(2.0 * 4 * side * rows * columns for side in sides) + 10.0 * rows * columns


def _zeros(piece: Piece) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), device=piece.master.device),
        "exp_avg": torch.zeros_like(piece.master),
        "exp_avg_sq": torch.zeros_like(piece.master),
    }
