"""The optimizer that splits pieces between Muon and AdamW."""

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from mplug import Optimizer, Piece, StepScalars
from mplug_muon.hidden import HiddenMatrices
from mplug_muon.rest import FusedAdamW

if TYPE_CHECKING:
    from mplug_muon.config import MuonConfig


class MuonAndAdamW(Optimizer):
    """Updates hidden matrices by Muon, and embeddings, the output head, norms and biases by AdamW."""

    needs: Literal["matrices"] = "matrices"

    def __init__(self, pieces: list[Piece], rank: int, config: "MuonConfig") -> None:
        hidden = [is_hidden_matrix(piece, config.tables) for piece in pieces]
        self._hidden = HiddenMatrices([p for p, its in zip(pieces, hidden, strict=True) if its], rank, config)
        self._rest = FusedAdamW([p for p, its in zip(pieces, hidden, strict=True) if not its], config)
        self._part_of = {p.name: self._hidden if its else self._rest for p, its in zip(pieces, hidden, strict=True)}

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        self._hidden.step(scalars)
        self._rest.step(scalars)

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live momentum of a hidden matrix, or the live moments and step count of another piece."""
        return self._part_of[piece.name].state(piece)


STACKS = ("expert", "every_expert")
"""Named axes along which separate matrices, or separate vectors (biases of experts), are stacked."""


def is_hidden_matrix(piece: Piece, tables: tuple[str, ...]) -> bool:
    """Whether a piece maps hidden activations to hidden activations, unlike a table, whose rows are separate vectors.

    True for parameters of two or more dimensions, besides `STACKS`, without an axis in `tables`.
    """
    of_one = [dim for dim in piece.parameter.dims if dim not in STACKS]
    return len(of_one) >= 2 and not piece.parameter.axes & set(tables)
