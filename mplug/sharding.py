"""Optimizer state and gradients divided over data-parallel ranks (ZeRO, arXiv 1910.02054): which rank owns what.

A `Sharding` is data, made by a strategy from the plan and the mesh. Buckets lay the local tensors of neighbouring
parameters end to end; of each bucket every rank owns some stretches. From that the host gives weights and gradients
their memory, and makes the pieces that the optimizer updates. All that comes after them (initial values, the norm,
checkpoints) reads their placements, in which a flat range of a tensor is boxes, as any other part is.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from mplug.mesh import Mesh
from mplug.plan import Box, Placement


@dataclass(frozen=True)
class Stretch:
    """Elements `start` to `stop` of a bucket, which the `owner`-th of the ranks along the bucket's axes owns."""

    start: int
    stop: int
    owner: int

    @property
    def length(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Local tensors end to end, each flat: those of `names` begin at `starts` and have `sizes` elements.

    What lies between them, up to `length`, is padding. The ranks along the mesh axes `axes` hold the same of it, and
    each owns `stretches`, which come in order; of one tensor a rank owns one stretch at most. `copied` are the other
    axes over which the gradients are partial.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    length: int
    axes: tuple[str, ...]
    stretches: tuple[Stretch, ...]
    copied: tuple[str, ...] = ()

    def is_even(self, num_owners: int) -> bool:
        """Whether the stretches are the bucket in equal parts, one for each of so many owners, in order."""
        each = self.length // num_owners
        return self.stretches == tuple(Stretch(n * each, (n + 1) * each, n) for n in range(num_owners))

    def owned(self, owner: int) -> list[tuple[Stretch, int]]:
        """The stretches of an owner, and where each begins if they are laid end to end."""
        found, end = [], 0
        for stretch in self.stretches:
            if stretch.owner == owner:
                found.append((stretch, end))
                end += stretch.length
        return found

    def part(self, name: str, owner: int) -> tuple[int, int]:
        """(start, stop): the elements of a tensor that an owner has, counted from the tensor's first."""
        where = self.names.index(name)
        first, size = self.starts[where], self.sizes[where]
        for stretch in self.stretches:
            start, stop = max(stretch.start - first, 0), min(stretch.stop - first, size)
            if stretch.owner == owner and start < stop:
                return start, stop
        return 0, 0


@dataclass(frozen=True)
class Sharding:
    """The buckets of a rank's parameters, in the order in which backward is done with them.

    Parameters in no bucket are nobody's part: each rank updates them whole. With `matrices`, every stretch is some
    whole matrices of a tensor, and a piece has its dimensions; otherwise a piece is flat. With `transient`, a bucket's
    gradients have memory only from when backward needs it until they are summed, and a rank keeps those that it owns:
    who computes weights' gradients outside of a backward pass cannot serve such a run.
    """

    buckets: tuple[Bucket, ...]
    matrices: bool = False
    transient: bool = False

    @cached_property
    def of(self) -> dict[str, Bucket]:
        """The bucket of every parameter that is in one."""
        return {name: bucket for bucket in self.buckets for name in bucket.names}

    def placed(self, whole: Placement) -> "ShardedPlacement":
        """Where the owned parts of a parameter live."""
        mesh, bucket = whole.mesh, self.of[whole.name]
        held = [bucket.part(whole.name, owner) for owner in range(math.prod(mesh.axes[a].size for a in bucket.axes))]
        owners = {owner for owner, (start, stop) in enumerate(held) if start < stop}
        holders = tuple(rank for rank in whole.holders if owner_of(mesh, rank, bucket.axes) in owners)
        return ShardedPlacement(
            whole.name, whole.parameter, whole.shape, mesh, holders, whole, bucket, flat=not self.matrices
        )


def owner_of(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> int:
    """A rank's number among those that differ from it along `axes` (of one view) only, in rank order."""
    number = 0
    for axis in (axis for view in mesh.views.values() for axis in view if axis.name in axes):
        number = number * axis.size + mesh.index(rank, axis.name)
    return number


@dataclass(frozen=True)
class FlatBox(Box):
    """A box whose rank keeps it in a flat tensor: from element `offset` on, with these `strides`."""

    strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardedPlacement(Placement):
    """Where a parameter lives of which each rank owns a part: of what `whole` places there, the bucket's stretch.

    `holders` are the ranks that own something. The local tensor is flat, or, where matrices stay whole, some rows of
    the whole one's.
    """

    whole: Placement
    bucket: Bucket
    flat: bool

    def part(self, rank: int) -> tuple[int, int]:
        """(start, stop) of the rank's part of the flat local tensor."""
        return self.bucket.part(self.name, owner_of(self.mesh, rank, self.bucket.axes))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the part: [elements], or [rows, ...]."""
        start, stop = self.part(rank)
        shape = self.whole.local_shape(rank)
        if self.flat or not shape:
            return (stop - start,) if self.flat else ()
        return ((stop - start) // math.prod(shape[1:]), *shape[1:])

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The boxes of the rank's part, held by whoever owns the same part of the same tensor."""
        start, stop = self.part(rank)
        shape = self.whole.local_shape(rank)
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        first = (start // strides[0], *(0,) * len(shape[1:])) if shape else ()  # of the rows that a matrix piece has
        found: list[Box] = []
        for box in self.whole.boxes(rank):
            for part in flat_boxes(shape, start, stop):
                if (cut := _overlap(box, part)) is None:
                    continue
                where, length = cut
                begin = tuple(s + w - o for s, w, o in zip(box.start, where, box.offset, strict=True))
                owners = (self._owners(rank, box.copies), self._owners(rank, box.partial))
                if self.flat:
                    at = sum(w * stride for w, stride in zip(where, strides, strict=True)) - start
                    found.append(FlatBox(begin, length, (at,), *owners, strides))
                else:
                    offset = tuple(w - f for w, f in zip(where, first, strict=True))
                    found.append(Box(begin, length, offset, *owners))
        return tuple(found)

    def _owners(self, rank: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        own = owner_of(self.mesh, rank, self.bucket.axes)
        return tuple(other for other in ranks if owner_of(self.mesh, other, self.bucket.axes) == own)


def _overlap(box: Box, part: Box) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(start, shape), in the local tensor, of what a box there and a part of it have in common."""
    start = tuple(max(o, s) for o, s in zip(box.offset, part.start, strict=True))
    stop = tuple(min(o + n, s + m) for o, n, s, m in zip(box.offset, box.shape, part.start, part.shape, strict=True))
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    return None if any(length <= 0 for length in shape) else (start, shape)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes that cover elements `start` to `stop` of a row-major tensor: at most three in two dimensions.

    `offset` counts elements from `start`: the boxes of a rank that holds a flat range (ZeRO, arXiv 1910.02054).
    """
    if start >= stop:
        return ()
    if len(shape) <= 1:
        return (Box((start,)[: len(shape)], (stop - start,)[: len(shape)], (0,)),)
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        return _rows(shape, first - 1, start - (first - 1) * inner, stop - (first - 1) * inner, 0)
    boxes = _rows(shape, first - 1, start - (first - 1) * inner, inner, 0) if start < first * inner else ()
    if first < last:
        middle = Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), (first * inner - start,))
        boxes += (middle,)
    return boxes + _rows(shape, last, 0, stop - last * inner, last * inner - start)


def _rows(shape: tuple[int, ...], row: int, start: int, stop: int, offset: int) -> tuple[Box, ...]:
    return tuple(
        Box((row, *box.start), (1, *box.shape), (box.offset[0] + offset,)) for box in flat_boxes(shape[1:], start, stop)
    )
