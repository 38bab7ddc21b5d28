"""What an optimizer calls to compute with whole matrices, or with sums over them, whichever mesh axes cut them."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mplug.contracts.optimizer import Piece
from mplug.distributed.groups import Groups
from mplug.gradients.region import region
from mplug.layout.placement import Box, Placement
from mplug.registry.provided import needed
from mplug.run.run import Run

Wanted = Callable[[Placement], bool]
"""Whether an optimizer needs something of a parameter; a pure function of its placement, equal on every rank."""
Cost = Callable[[int, int], float]
"""(rows, columns) -> the work of updating a matrix of this shape, in any unit."""


@dataclass(frozen=True)
class Assembler:
    """Brings together what several ranks hold of a matrix.

    `placements` are those of the pieces that this rank and others of its stage update, also of pieces that this rank
    has no part of. `everywhere` are those of all stages. Without `groups` (one process, or a build without memory),
    nothing is exchanged.

    Every rank must call the methods alike, also a rank without pieces: they make process groups. UsageError if no
    installed distribution brings the class of the entry-point group 'mplug.assemblers'.
    """

    run: Run
    placements: Mapping[str, Placement]
    everywhere: Iterable[Placement]
    groups: Groups | None = None
    asked: set[str] = field(default_factory=set)
    """The parameters whose elements the optimizer does not update one by one."""

    def matrices(
        self, wanted: Wanted, cost: Cost, dtype: torch.dtype | None = None, items: Collection[str] = ()
    ) -> Any:
        """The matrices of the parameters that are `wanted`: segments of fused weights, and items of stacks.

        Each matrix has one owner, among the ranks that hold a part of it; `cost` balances their work. Values travel in
        `dtype` (None: that of the masters). A segment of rows along a named axis in `items` (heads) is as many matrices
        as it has items. Returns `mplug_matrices.Matrices`.
        """
        self.asked.update(one.name for one in filter(wanted, self.placements.values()))
        return self._assembling().matrices(self, wanted, cost, dtype, items)

    def sums(self, num_dims: Callable[[Placement], int]) -> Any:
        """Sums over the blocks of all parameters; the last `num_dims` dimensions are those of one matrix or vector.

        Each block is a segment of a fused weight, and a stack of matrices if dimensions precede those. Returns
        `mplug_matrices.Sums`.
        """
        self.asked.update(self.placements)
        return self._assembling().sums(self, num_dims)

    def parts(self, piece: Piece) -> list[tuple[Box, torch.Tensor]]:
        """The boxes of the logical tensor that a piece consists of, each with the view of its master."""
        return [(box, region(piece.master, box)) for box in piece.placement.boxes(self.run.rank)]

    def _assembling(self) -> "Assembling":
        what = "an optimizer that computes with whole matrices, or with sums over them"
        found: Assembling = needed("assemblers", what, "mplug-matrices")
        return found


class Assembling(Protocol):
    """The methods of the class in the entry-point group 'mplug.assemblers': those of `Assembler`."""

    def matrices(
        self, assembler: Assembler, wanted: Wanted, cost: Cost, dtype: torch.dtype | None, items: Collection[str]
    ) -> Any:
        """The matrices of the wanted parameters."""

    def sums(self, assembler: Assembler, num_dims: Callable[[Placement], int]) -> Any:
        """Sums over blocks."""
