"""The matrices of parameters: who holds their parts, and which rank owns each. Pure data, for any rank.

An optimizer such as Muon computes with whole matrices: a segment of a fused weight, an item of a stack. The ranks
along several mesh axes may hold parts of one (tensor parallelism, rows at rest, ranges of an optimizer's state), and
others hold copies. All of this follows from the boxes of the placements.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import prod

from mplug.layout.ownership import FlatBox
from mplug.layout.placement import Box, Placement
from mplug.layout.plan import Segment
from mplug.model.assembler import Cost


@dataclass(frozen=True)
class Block:
    """A stack of matrices (or vectors) of one segment: a box of a logical tensor.

    The last `num_dims` dimensions are those of one matrix; `segment` numbers the combination of segments along them.
    The dimensions before them are stacked.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    num_dims: int
    segment: int

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of one matrix."""
        return self.shape[len(self.shape) - self.num_dims :]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def matrices(self) -> Iterator["Block"]:
        """The block's matrices, one by one."""
        num_stacked = len(self.shape) - self.num_dims
        for index in product(*map(range, self.shape[:num_stacked])):
            start = (*(s + i for s, i in zip(self.start, index, strict=False)), *self.start[num_stacked:])
            yield replace(self, start=start, shape=((1,) * num_stacked + self.matrix_shape))


def blocks_of(placement: Placement, rank: int, num_dims: int, items: Collection[str] = ()) -> list[Block]:
    """The blocks that the ranks which share them with `rank` hold (`Placement.sharing`), in a fixed order.

    Along the stacked dimensions they contain what these ranks hold, along the others whole segments. A segment of rows
    along one of the named axes `items` (heads) is as many matrices as it has items.
    """
    num_dims = min(num_dims, len(placement.shape))
    first = len(placement.shape) - num_dims
    ranges: list[list[tuple[int, int]]] = []
    for number, (dim, cuts) in enumerate(zip(placement.dims, placement.cuts, strict=True)):
        if number < first:
            index = [placement.mesh.index(rank, cut.axis) if cut.axis else 0 for cut in cuts]
            ranges.append([cut.range_at(own) for cut, own in zip(cuts, index, strict=True)])
        else:
            ranges.append(list(_whole(dim, items if number == first and num_dims > 1 else ())))
    found = []
    for number, parts in enumerate(product(*ranges)):
        start, shape = tuple(start for start, _ in parts), tuple(length for _, length in parts)
        if prod(shape):
            found.append(Block(placement.name, start, shape, num_dims, number))
    return found


def _whole(dim: Sequence[Segment], items: Collection[str]) -> Iterator[tuple[int, int]]:
    """(start, length) of each segment, or of each item of a segment whose axis is in `items`."""
    lengths = [
        length
        for segment in dim
        for length in ([segment.width] * segment.count if segment.axis in items else [segment.length])
    ]
    yield from ((start, stop - start) for start, stop in pairwise(accumulate(lengths, initial=0)))


@dataclass(frozen=True)
class Held:
    """The part of a block that a rank holds: `start` counts from the block's start.

    `box` is the same part as a box of the logical tensor; its `copies` are the ranks that hold the same part.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    box: Box

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def where(self) -> tuple[slice, ...]:
        """The part as an index of the block's tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.start, self.shape, strict=True))


def held_of(block: Block, boxes: Iterable[Box]) -> tuple[Held, ...]:
    """The parts of a block in a rank's boxes, in the order of their starts."""
    found = []
    for box in boxes:
        start = tuple(map(max, box.start, block.start))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(box.start, box.shape, block.start, block.shape, strict=True)
        )
        shape = tuple(high - low for low, high in zip(start, stop, strict=True))
        if all(length > 0 for length in shape):
            within = tuple(low - own for low, own in zip(start, block.start, strict=True))
            found.append(Held(within, shape, _part_of(box, start, shape)))
    return tuple(sorted(found, key=lambda held: held.start))


def _part_of(box: Box, start: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """The part of a box with this start and shape in the logical tensor."""
    inside = tuple(low - own for low, own in zip(start, box.start, strict=True))
    if isinstance(box, FlatBox):
        first = box.offset[0] + sum(n * stride for n, stride in zip(inside, box.strides, strict=True))
        return replace(box, start=start, shape=shape, offset=(first,))
    offset = tuple(own + n for own, n in zip(box.offset, inside, strict=True))
    return replace(box, start=start, shape=shape, offset=offset)


@dataclass(frozen=True)
class Shared:
    """A block, and the parts of it that ranks hold: every rank that holds a part or a copy of one."""

    block: Block
    held: Mapping[int, tuple[Held, ...]]

    def sources(self, to: int) -> dict[int, list[Held]]:
        """For each rank that sends, the parts that it sends so that rank `to` has the whole block.

        A part comes from `to` itself, if it holds it, otherwise from the nearest rank with a copy.
        """
        found = defaultdict[int, list[Held]](list)
        seen = set[tuple[int, ...]]()
        for rank in sorted(self.held, key=lambda rank: (abs(rank - to), rank)):
            for held in self.held[rank]:
                if held.start not in seen:
                    seen.add(held.start)
                    found[rank].append(held)
        return found


def shared_blocks(placement: Placement, blocks: Iterable[Block], ranks: Iterable[int]) -> list[Shared]:
    """The blocks of a parameter with the parts that each of `ranks` holds."""
    boxes = {rank: placement.boxes(rank) for rank in ranks}
    found = []
    for block in blocks:
        held = {rank: parts for rank, own in boxes.items() if (parts := held_of(block, own))}
        found.append(Shared(block, held))
    return found


def owners_of(shared: Sequence[Shared], cost: Cost) -> list[int]:
    """The rank that owns each matrix: the one with the least work among those that hold a part of it.

    The most expensive matrix comes first (longest processing time first); ties go to the earlier matrix and the lower
    rank. So the answer is the same on every rank.
    """
    works = [cost(*one.block.matrix_shape[-2:]) for one in shared]
    loads = defaultdict[int, float](float)
    found = [0] * len(shared)
    for number in sorted(range(len(shared)), key=lambda number: (-works[number], number)):
        owner = min(shared[number].held, key=lambda rank: (loads[rank], rank))
        loads[owner] += works[number]
        found[number] = owner
    return found
