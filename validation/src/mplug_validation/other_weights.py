"""Forward passes with other weights than those that are trained: an optimizer state of the shape of the masters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from mplug.contracts.optimizer import Optimizer, Piece
from mplug.model.model import Model
from mplug.model.pieces import write_weights


@contextmanager
def in_place(state: str, model: Model, pieces: Iterable[Piece], optimizer: Optimizer) -> Iterator[None]:
    """In the block, the model computes with the values of a state (the averages, the first weights). Collective.

    Masters and the state exchange their values, and again after the block. An error in the block ends the run, so
    nothing is exchanged after it. The memory is that of the largest piece.
    """
    _exchange(state, model, pieces, optimizer)
    yield
    _exchange(state, model, pieces, optimizer)


@torch.no_grad()
def _exchange(state: str, model: Model, pieces: Iterable[Piece], optimizer: Optimizer) -> None:
    model.weights_settled()  # an exchange that is under way still reads the masters
    for piece in pieces:
        other = optimizer.state(piece).get(state)
        if isinstance(other, torch.Tensor):  # the optimizer of a group may keep none
            trained = piece.master.clone()
            piece.master.copy_(other)
            other.copy_(trained)
    write_weights(pieces)
    model.weights_written()
