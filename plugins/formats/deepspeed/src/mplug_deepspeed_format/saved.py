"""Tensors of a checkpoint of DeepSpeed, as views of its files: each is cut into flat pieces, which ranks have saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """A weight: the flat pieces [n] of its values and of its states, in order, and the states that are numbers.

    Together, the pieces have the elements of `shape`. They are mapped from files and take no memory.
    """

    shape: Shape
    pieces: Mapping[str, Sequence[Tensor]]
    numbers: Mapping[str, float] = field(default_factory=dict)

    def fault(self) -> str:
        """Why the pieces are not the whole tensor; the empty string if they are."""
        for state, pieces in self.pieces.items():
            found = sum(piece.numel() for piece in pieces)
            if found != prod(self.shape):
                return f"{found} elements of its {state}, which has {prod(self.shape)}"
        return ""

    def read(self, state: str, start: Shape, shape: Shape) -> Tensor:
        """A box of the values or of a state."""
        if not self.shape:
            return join(self.pieces[state], 0, 1).detach().reshape(())
        inner = prod(self.shape[1:])
        rows = join(self.pieces[state], start[0] * inner, shape[0] * inner).detach().view(shape[0], *self.shape[1:])
        return rows[(slice(None), *(slice(s, s + n) for s, n in zip(start[1:], shape[1:], strict=True)))]


def join(pieces: Sequence[Tensor], start: int, length: int) -> Tensor:
    """The elements from `start` on of consecutive flat pieces. A copy only if they are in several pieces."""
    found, begin = [], 0
    for piece in pieces:
        low, high = max(start - begin, 0), min(start + length - begin, piece.numel())
        if low < high:
            found.append(piece[low:high])
        begin += piece.numel()
    if not found:
        return torch.empty(0)
    return found[0] if len(found) == 1 else torch.cat(found)
