"""What an optimizer updates on a rank: pieces, and the values of all parameters."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from mplug.contracts.optimizer import Piece
from mplug.layout.placement import Placement
from mplug.model.model import Model
from mplug.model.sharding import shardings


def make_pieces(model: Model) -> list[Piece]:
    """The pieces of this rank: for a sharded parameter the part that it owns, for any other the whole local tensor.

    A parameter in the masters' dtype is its own master; any other gets a separate master. If an engine keeps the
    masters, its strategy has supplied the pieces.
    """
    if model.engine is not None:
        return shardings().pieces_of_engine(model)
    pieces, owned = [], model.shards.pieces() if model.shards else {}
    for name, sink in model.sinks.items():
        if name in owned:
            pieces += [piece for piece in [owned[name]] if piece is not None]
            continue
        weight, placement = sink.parameter.data, model.placements[name]
        own = weight.dtype == model.master_dtype
        master = weight if own else weight.to(model.master_dtype)
        pieces.append(Piece(name, master, sink.buffer, None if own else weight, placement.parameter, placement))
    return pieces


class Held(NamedTuple):
    """A parameter's values on this rank, as stored at rest."""

    name: str
    values: Tensor
    placement: Placement


def held_values(model: Model, pieces: Iterable[Piece]) -> list[Held]:
    """The values of all parameters of this rank: the masters of pieces, and the frozen parameters themselves."""
    frozen = [Held(name, parameter.data, model.placements[name]) for name, parameter in model.frozen.items()]
    return [Held(piece.name, piece.master, piece.placement) for piece in pieces] + frozen


@torch.no_grad()
def write_weights(pieces: Iterable[Piece]) -> None:
    """Round the masters into the weights that the model computes with."""
    rounded = [(piece.weight, piece.master) for piece in pieces if piece.weight is not None]
    if rounded:
        torch._foreach_copy_([weight for weight, _ in rounded], [master for _, master in rounded])
