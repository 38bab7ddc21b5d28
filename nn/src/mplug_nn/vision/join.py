"""The join of a stream with the tokens. B batch, S sequence, s positions of this rank, R rows, r rows of this rank."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mplug.model.slots.declaration import Slot, set_defaults


def all_rows(rows: Tensor) -> Tensor:
    """The rows of all ranks: the default of the slot `Join.gather`, which is the identity.

    rows [1, r, E] -> [1, R, E]. A strategy that divides the rows of a stream between two blocks gathers them here; in
    backward, it sums the gradients of all ranks' positions.
    """
    return rows


def own_positions(places: Tensor) -> Tensor:
    """The entries of this rank's positions: the default of the slot `Join.positions`, which is the identity.

    places [B, S] -> [B, s]. A strategy that divides the sequence between two blocks takes this rank's positions here.
    """
    return places


def computed_here(rows: Tensor, returns: Mapping[str, Any]) -> Tensor:
    """The rows of this rank's own micro batch: the default of the slot `Join.bring_back`, which is the identity.

    rows [R, E], and the entry `mplug.RETURNS` -> [R', E]. If ranks balance streams, the host brings the rows back from
    the ranks that have computed them; in backward, gradients go there.
    """
    return rows


GATHER = Slot("Join.gather", "join", all_rows)
POSITIONS = Slot("Join.positions", "join", own_positions)
BRING_BACK = Slot("Join.bring_back", "join", computed_here, returns_rows=True)


class StreamJoin(nn.Module):
    """Rows of a stream in place of the hidden states of some positions; with `add`, added to them (DeepStack).

    DeepStack is arXiv 2406.04334.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (GATHER, POSITIONS, BRING_BACK)
    mixes: ClassVar[frozenset[str]] = frozenset()
    gather: Callable[[Tensor], Tensor]
    positions: Callable[[Tensor], Tensor]
    bring_back: Callable[[Tensor, Mapping[str, Any]], Tensor]

    def __init__(self, add: bool = False) -> None:
        super().__init__()
        self.add = add
        set_defaults(self)

    def forward(self, hidden: Tensor, rows: Tensor, places: Tensor, returns: Mapping[str, Any] | None = None) -> Tensor:
        """hidden [B, s, E], rows [1, r, E], places [B, S]: the row of each position, or -1 -> [B, s, E].

        `returns` is the optional entry `mplug.RETURNS`.
        """
        own, table = self.positions(places), self.gather(rows)[0]
        if returns is not None:
            table = self.bring_back(table, returns)
        chosen = F.embedding(own.clamp(min=0), table)  # [B, s, E]
        joined = hidden + chosen if self.add else chosen
        return torch.where((own >= 0)[..., None], joined, hidden)
