"""The whole tensors of several parameters, in memory that exists only while they are needed.

All collectives work on this memory itself: no weight and no gradient is copied into or out of a buffer of its own.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

ALIGNED = 512
"""Tensors start at multiples of this many bytes, a good alignment for products and transfers in any format."""


class Format(NamedTuple):
    """The shape and the dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Padded:
    """One allocation of several tensors, each padded to `size` equal parts of whole rows; rank `rank` owns a part.

    `whole` are the tensors without padding. `parts` [size, n] are the same memory with padding, by rank. `own` are the
    rows of this rank, without padding. Values are undefined after `allocate`.
    """

    def __init__(self, formats: Sequence[Format], size: int, rank: int, device: torch.device) -> None:
        shapes = [one.shape for one in formats]
        rows = [-(-shape[0] // size) for shape in shapes]  # of a part
        lengths = [
            size * each * prod(shape[1:]) * dtype.itemsize for each, (shape, dtype) in zip(rows, formats, strict=True)
        ]
        *starts, end = accumulate((-(-length // ALIGNED) * ALIGNED for length in lengths), initial=0)
        flat = torch.empty(end, dtype=torch.uint8, device=device)
        self._storage, self._num_bytes = flat.untyped_storage(), flat.nbytes
        self.is_allocated = True
        stretches = [
            flat[start : start + length].view(dtype)
            for start, length, (_, dtype) in zip(starts, lengths, formats, strict=True)
        ]
        # Autograd checks that the weights that it saves do not change: `data` has a version counter of its own.
        self.whole = [stretch[: prod(shape)].view(shape).data for stretch, shape in zip(stretches, shapes, strict=True)]
        self.parts = [stretch.view(size, -1) for stretch in stretches]
        self.own = [
            part[rank][: max(0, min(each, shape[0] - rank * each)) * prod(shape[1:])].view(-1, *shape[1:])
            for part, each, shape in zip(self.parts, rows, shapes, strict=True)
        ]
        self.free()

    def allocate(self) -> None:
        """Allocate the memory, for use on the current stream."""
        self._storage.resize_(self._num_bytes)
        self.is_allocated = True

    def free(self) -> None:
        """Free the memory; the current stream must have waited for everything that uses it."""
        self._storage.resize_(0)
        self.is_allocated = False
