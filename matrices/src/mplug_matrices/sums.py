"""Sums and largest values of rows, columns or all elements of matrices, of which several ranks hold parts or copies."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from mplug.gradients.region import region
from mplug_matrices.blocks import Block, Held, Shared
from mplug_ops import Exchange, Item

Dims = tuple[int, ...]
"""Dimensions to sum over, counted from the last: (-1,) gives a sum for each row, (-2,) one for each column."""
Tensors = Mapping[str, Tensor]
"""A tensor of the shape of its piece for each piece, by the name of the parameter."""


@dataclass(frozen=True)
class BlockPart:
    """A part of a block on this rank: views of a piece's tensors by `of`, of the block's sums by `within`."""

    block: Block
    held: Held
    counts: bool
    """Whether this rank adds its values to sums: one of the ranks with copies does."""

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a tensor of the piece."""
        return region(tensor, self.held.box)

    def within(self, total: Tensor) -> Tensor:
        """The view of a sum with the block's number of dimensions; summed dimensions have one element."""
        where = (slice(None) if n == 1 else cut for n, cut in zip(total.shape, self.held.where, strict=True))
        return total[tuple(where)]


@dataclass(frozen=True)
class Summands:
    """The blocks that the same ranks share, in an order that is the same on all of them."""

    rank: int
    group: dist.ProcessGroup | None
    shared: Sequence[Shared]

    @cached_property
    def parts(self) -> list[BlockPart]:
        """This rank's parts."""
        found = []
        for one in self.shared:
            for held in one.held.get(self.rank, ()):
                holders = (rank for rank, parts in one.held.items() if any(held.start == own.start for own in parts))
                found.append(BlockPart(one.block, held, min(holders) == self.rank))
        return found

    @cached_property
    def exchange(self) -> Exchange:
        """What the ranks sum as one flat tensor."""
        return Exchange("sums of matrices", self.group, [Item(*_item(one.block)) for one in self.shared])


def _item(block: Block) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return block.name, block.shape, block.start


class Sums:
    """Sums over blocks of parameters: segments of fused weights, stacks of matrices, vectors."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, summands: Callable[[], list[Summands]], eager: bool = False
    ) -> None:
        self.device, self.dtype = device, dtype
        self._make = summands
        if eager:
            _ = self.parts

    @cached_property
    def _summands(self) -> list[Summands]:
        return self._make()

    @cached_property
    def parts(self) -> dict[str, list[BlockPart]]:
        """This rank's parts of blocks, by the name of the parameter."""
        found = defaultdict[str, list[BlockPart]](list)
        for one in self._summands:
            for part in one.parts:
                found[part.block.name].append(part)
        return dict(found)

    @cached_property
    def blocks(self) -> dict[str, list[Block]]:
        """The blocks of each parameter, also those that this rank holds no part of."""
        found = defaultdict[str, list[Block]](list)
        for summands in self._summands:
            for one in summands.shared:
                found[one.block.name].append(one.block)
        return dict(found)

    @cached_property
    def writers(self) -> dict[Block, int]:
        """For each block, the first rank that holds a part of it: it writes what all of them know to checkpoints."""
        return {one.block: min(one.held) for summands in self._summands for one in summands.shared}

    def of(
        self, tensors: Tensors, over: Callable[[Block], Sequence[Dims]], function: Callable[[Tensor], Tensor]
    ) -> dict[Block, list[Tensor]]:
        """The sums of a function of the elements, for each block one for each of the `over` dimensions.

        Summed dimensions have one element. Every rank that holds a part of a block gets its sums, equal to the bit.
        Collective: one all-reduce for the parameters that the same ranks share.
        """

        def summed(part: BlockPart) -> list[Tensor]:
            values = function(part.of(tensors[part.block.name]))
            return [values.sum(dims, keepdim=True, dtype=self.dtype) if dims else values for dims in over(part.block)]

        return self._reduced(over, summed, torch.add, dist.ReduceOp.SUM)

    def largest(
        self, maxima: Callable[[BlockPart], Sequence[Tensor]], over: Callable[[Block], Sequence[Dims]]
    ) -> dict[Block, list[Tensor]]:
        """The largest of non-negative values, for each block one for each of the `over` dimensions, as `of` for sums.

        `maxima` returns those of a part of this rank, for each of the `over` dimensions of its block.
        """
        return self._reduced(over, maxima, torch.maximum, dist.ReduceOp.MAX)

    def _reduced(
        self,
        over: Callable[[Block], Sequence[Dims]],
        of_part: Callable[[BlockPart], Sequence[Tensor]],
        combine: Callable[..., Tensor],
        reduction: dist.ReduceOp.RedOpType,
    ) -> dict[Block, list[Tensor]]:
        found: dict[Block, list[Tensor]] = {}
        for one in self._summands:
            shapes = [
                (shared.block, _summed(shared.block, dims)) for shared in one.shared for dims in over(shared.block)
            ]
            flat = torch.zeros(sum(prod(shape) for _, shape in shapes), dtype=self.dtype, device=self.device)
            own: dict[Block, list[Tensor]] = {shared.block: [] for shared in one.shared}
            for (block, shape), part in zip(shapes, flat.split([prod(shape) for _, shape in shapes]), strict=True):
                own[block].append(part.view(shape))
            for part in filter(lambda part: part.counts, one.parts):
                for total, values in zip(own[part.block], of_part(part), strict=True):
                    within = part.within(total)
                    combine(within, values.to(self.device, self.dtype), out=within)
            if one.group is not None:
                one.exchange.check()
                dist.all_reduce(flat, reduction, group=one.group)
            found |= own
        return found

    def __iter__(self) -> Iterator[BlockPart]:
        """This rank's parts."""
        return (part for parts in self.parts.values() for part in parts)


def _summed(block: Block, dims: Dims) -> tuple[int, ...]:
    """The shape of a block's sum."""
    where = {dim % len(block.shape) for dim in dims} if block.shape else set()
    return tuple(1 if number in where else length for number, length in enumerate(block.shape))
