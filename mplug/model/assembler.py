"""Brings together what several ranks hold of a matrix, for optimizers that compute with more than elements."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mplug.contracts.optimizer import Piece
from mplug.distributed.groups import Groups
from mplug.gradients.region import region
from mplug.layout.matrices import Cost, Shared, blocks_of, owners_of, shared_blocks
from mplug.layout.placement import Box, Placement
from mplug.layout.ranks import Grouping, Ranks
from mplug.model.matrices import Family, Matrices
from mplug.model.sums import Summands, Sums
from mplug.run.run import Run

Wanted = Callable[[Placement], bool]
"""Whether an optimizer needs something of a parameter; a pure function of its placement, equal on every rank."""


@dataclass(frozen=True)
class Assembler:
    """What an optimizer calls to compute with whole matrices, whichever mesh axes cut them.

    `placements` are those of the pieces that this rank and others of its stage update, also of pieces that this rank
    has no part of. `everywhere` are those of all stages. Without `groups` (one process, or a build without memory),
    nothing is exchanged.

    Every rank must call the methods alike, also a rank without pieces: they make process groups.
    """

    run: Run
    placements: Mapping[str, Placement]
    everywhere: Iterable[Placement]
    groups: Groups | None = None
    asked: set[str] = field(default_factory=set)
    """The parameters whose elements the optimizer does not update one by one."""

    def matrices(
        self, wanted: Wanted, cost: Cost, dtype: torch.dtype | None = None, items: Collection[str] = ()
    ) -> Matrices:
        """The matrices of the parameters that are `wanted`: segments of fused weights, and items of stacks.

        Each matrix has one owner, among the ranks that hold a part of it; `cost` balances their work. Values travel in
        `dtype` (None: that of the masters). A segment of rows along a named axis in `items` (heads) is as many matrices
        as it has items.
        """
        families = self._families(wanted, 2)
        self.asked.update(one.name for one in filter(wanted, self.placements.values()))
        dtype = self.run.precision.master_dtype if dtype is None else dtype

        def family(number: int) -> Family:
            ranks, group, placements = families[number]
            shared: list[Shared] = []
            for placement in placements:
                blocks = blocks_of(placement, self.run.rank, 2, items)
                single = [matrix for block in blocks for matrix in block.matrices()]
                shared += shared_blocks(placement, single, ranks)
            return Family(self.run.rank, ranks, group, shared, owners_of(shared, cost))

        return Matrices(
            torch.device(self.run.device),
            dtype,
            frozenset(one.name for _, _, placements in families for one in placements),
            lambda: [family(number) for number in range(len(families))],
            eager=self.groups is not None,
        )

    def sums(self, num_dims: Callable[[Placement], int]) -> Sums:
        """Sums over the blocks of all parameters; the last `num_dims` dimensions are those of one matrix or vector.

        Each block is a segment of a fused weight, and a stack of matrices if dimensions precede those.
        """
        self.asked.update(self.placements)
        numbers = sorted({num_dims(one) for one in self.everywhere})
        families = [
            family
            for number in numbers
            for family in self._families(lambda one, number=number: num_dims(one) == number, number)  # type: ignore[misc]
        ]

        def summands() -> list[Summands]:
            found = []
            for ranks, group, placements in families:
                shared: list[Shared] = []
                for placement in placements:
                    blocks = blocks_of(placement, self.run.rank, num_dims(placement))
                    shared += shared_blocks(placement, blocks, ranks)
                found.append(Summands(self.run.rank, group, shared))
            return found

        dtype = torch.promote_types(self.run.precision.master_dtype, torch.float32)
        return Sums(torch.device(self.run.device), dtype, summands, eager=self.groups is not None)

    def parts(self, piece: Piece) -> list[tuple[Box, torch.Tensor]]:
        """The boxes of the logical tensor that a piece consists of, each with the view of its master."""
        return [(box, region(piece.master, box)) for box in piece.placement.boxes(self.run.rank)]

    def _families(self, wanted: Wanted, num_dims: int) -> list[tuple[Ranks, dist.ProcessGroup | None, list[Placement]]]:
        """The wanted parameters of this rank's stage by the ranks that share them, with the group of these ranks."""
        groupings: dict[Ranks, Grouping] = {}
        for placement in filter(wanted, self.everywhere):
            grouping = placement.sharing(num_dims)
            groupings.setdefault(grouping.leader, grouping)
        own: dict[Ranks, list[Placement]] = {leader: [] for leader in groupings}
        for placement in filter(wanted, self.placements.values()):
            own[placement.sharing(num_dims).leader].append(placement)
        found = []
        for leader, grouping in groupings.items():  # in the order of the plan, on every rank
            group = None if self.groups is None else self.groups.of(grouping)
            if own[leader]:
                found.append((grouping.of(self.run.rank), group, own[leader]))
        return found
