"""The whole tensors of several parameters, in memory that exists only while they are needed.

All collectives work on this memory itself: no weight and no gradient is copied into or out of a buffer of its own.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch

ALIGNED = 64
"""Tensors start at multiples of this many elements: 128 bytes of bf16, a good alignment for products and transfers."""


class Padded:
    """One allocation of several tensors, each padded to `size` equal parts of whole rows; rank `rank` owns a part.

    `whole` are the tensors without padding. `parts` [size, n] are the same memory with padding, by rank. `own` are the
    rows of this rank, without padding. Values are undefined after `allocate`.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], size: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        rows = [-(-shape[0] // size) for shape in shapes]  # of a part
        lengths = [size * each * prod(shape[1:]) for each, shape in zip(rows, shapes, strict=True)]
        *starts, end = accumulate((-(-length // ALIGNED) * ALIGNED for length in lengths), initial=0)
        flat = torch.empty(end, dtype=dtype, device=device)
        self._storage, self._num_bytes = flat.untyped_storage(), flat.nbytes
        self.is_allocated = True
        # Autograd checks that the weights that it saves do not change: `data` has a version counter of its own.
        self.whole = [flat[at : at + prod(shape)].view(shape).data for at, shape in zip(starts, shapes, strict=True)]
        stretches = [flat[start : start + length] for start, length in zip(starts, lengths, strict=True)]
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
