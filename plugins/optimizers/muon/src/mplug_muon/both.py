"""The optimizer that splits pieces between Muon and AdamW."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from mplug import Optimizer, Piece, StepScalars
from mplug_muon.hidden import HiddenMatrices
from mplug_muon.rest import FusedAdamW
from mplug_muon.routing import is_hidden_matrix

if TYPE_CHECKING:
    from mplug import Assembler
    from mplug_muon.clip import Clipped
    from mplug_muon.config import MuonConfig


class MuonAndAdamW(Optimizer):
    """Updates hidden matrices by Muon, and embeddings, the output head, norms and biases by AdamW."""

    def __init__(
        self,
        pieces: list[Piece],
        assembler: "Assembler",
        config: "MuonConfig",
        clipped: "Mapping[str, list[Clipped]] | None" = None,
    ) -> None:
        is_hidden = partial(is_hidden_matrix, tables=config.tables)
        self._hidden = HiddenMatrices([piece for piece in pieces if is_hidden(piece.parameter)], assembler, config)
        self._rest = FusedAdamW([piece for piece in pieces if not is_hidden(piece.parameter)], config)
        self._clip = None
        if clipped:
            from mplug_muon.clip import Clip

            self._clip = Clip(pieces, assembler, clipped, config)
        self._part_of = {piece.name: self._hidden if is_hidden(piece.parameter) else self._rest for piece in pieces}

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        self._hidden.step(scalars)
        self._rest.step(scalars)
        if self._clip is not None:
            self._clip(scalars)

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live momentum of a hidden matrix, or the live moments and step count of another piece."""
        return self._part_of[piece.name].state(piece)
