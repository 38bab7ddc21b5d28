"""Brings together what several ranks hold of a matrix, for optimizers that compute with more than elements."""

from collections.abc import Callable, Collection

import torch
import torch.distributed as dist

from mplug.layout.placement import Placement
from mplug.layout.ranks import Grouping, Ranks
from mplug.model.assembler import Assembler, Cost, Wanted
from mplug_matrices.blocks import Shared, blocks_of, owners_of, shared_blocks
from mplug_matrices.matrices import Family, Matrices
from mplug_matrices.sums import Summands, Sums


class Assembling:
    """The class of the entry-point group 'mplug.assemblers' (`mplug.model.assembler.Assembling`)."""

    def matrices(
        self, assembler: Assembler, wanted: Wanted, cost: Cost, dtype: torch.dtype | None, items: Collection[str]
    ) -> Matrices:
        """The matrices of the wanted parameters."""
        run = assembler.run
        families = _families(assembler, wanted, 2)
        dtype = run.precision.master_dtype if dtype is None else dtype

        def family(number: int) -> Family:
            ranks, group, placements = families[number]
            shared: list[Shared] = []
            for placement in placements:
                blocks = blocks_of(placement, run.rank, 2, items)
                single = [matrix for block in blocks for matrix in block.matrices()]
                shared += shared_blocks(placement, single, ranks)
            return Family(run.rank, ranks, group, shared, owners_of(shared, cost))

        return Matrices(
            torch.device(run.device),
            dtype,
            frozenset(one.name for _, _, placements in families for one in placements),
            lambda: [family(number) for number in range(len(families))],
            eager=assembler.groups is not None,
        )

    def sums(self, assembler: Assembler, num_dims: Callable[[Placement], int]) -> Sums:
        """Sums over the blocks of all parameters."""
        run = assembler.run
        numbers = sorted({num_dims(one) for one in assembler.everywhere})
        families = [
            family
            for number in numbers
            for family in _families(assembler, lambda one, number=number: num_dims(one) == number, number)  # type: ignore[misc]
        ]

        def summands() -> list[Summands]:
            found = []
            for ranks, group, placements in families:
                shared: list[Shared] = []
                for placement in placements:
                    blocks = blocks_of(placement, run.rank, num_dims(placement))
                    shared += shared_blocks(placement, blocks, ranks)
                found.append(Summands(run.rank, group, shared))
            return found

        dtype = torch.promote_types(run.precision.master_dtype, torch.float32)
        return Sums(torch.device(run.device), dtype, summands, eager=assembler.groups is not None)


def _families(
    assembler: Assembler, wanted: Wanted, num_dims: int
) -> list[tuple[Ranks, dist.ProcessGroup | None, list[Placement]]]:
    """The wanted parameters of this rank's stage by the ranks that share them, with the group of these ranks."""
    groupings: dict[Ranks, Grouping] = {}
    for placement in filter(wanted, assembler.everywhere):
        grouping = placement.sharing(num_dims)
        groupings.setdefault(grouping.leader, grouping)
    own: dict[Ranks, list[Placement]] = {leader: [] for leader in groupings}
    for placement in filter(wanted, assembler.placements.values()):
        own[placement.sharing(num_dims).leader].append(placement)
    found = []
    for leader, grouping in groupings.items():  # in the order of the plan, on every rank
        group = None if assembler.groups is None else assembler.groups.of(grouping)
        if own[leader]:
            found.append((grouping.of(assembler.run.rank), group, own[leader]))
    return found
