"""Which data-parallel rank owns which optimizer state and gradients (ZeRO, arXiv 1910.02054).

A `Sharding` is data. A strategy computes it from the plan and the mesh. A bucket concatenates the local tensors of
neighbouring parameters, and every rank owns some stretches of each bucket. From a sharding the host allocates weights
and gradients, and makes the pieces that the optimizer updates. Initialisation, the norm and checkpoints read only the
placements of the pieces, which describe a flat range of a tensor as boxes, like any other part.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from mplug.layout.mesh import Mesh
from mplug.layout.placement import Box, Placement


@dataclass(frozen=True)
class Stretch:
    """Elements `start` to `stop` of a bucket; the `owner`-th of the ranks along the bucket's axes owns them."""

    start: int
    stop: int
    owner: int

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Flattened local tensors in one flat range: those of `names` begin at `starts` and have `sizes` elements.

    Elements between them, and after the last up to `length`, are padding. The ranks along the mesh axes `axes` hold the
    same bucket, and each owns some of the `stretches`, which are in order. A rank owns at most one contiguous range of
    a tensor. `copied` are the other axes over which the gradients are partial.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    length: int
    axes: tuple[str, ...]
    stretches: tuple[Stretch, ...]
    copied: tuple[str, ...] = ()

    def is_even(self, num_owners: int) -> bool:
        """Whether the stretches divide the bucket into `num_owners` equal parts, one per owner, in order."""
        each = self.length // num_owners
        return self.stretches == tuple(Stretch(n * each, (n + 1) * each, n) for n in range(num_owners))

    def owned(self, owner: int) -> list[tuple[Stretch, int]]:
        """The stretches of an owner, each with its start when the owner's stretches are concatenated."""
        found, end = [], 0
        for stretch in self.stretches:
            if stretch.owner == owner:
                found.append((stretch, end))
                end += stretch.length
        return found

    def part(self, name: str, owner: int) -> tuple[int, int]:
        """(start, stop): the elements of the flat tensor that the owner owns; (0, 0) if it owns none."""
        where = self.names.index(name)
        first, size = self.starts[where], self.sizes[where]
        for stretch in self.stretches:
            start, stop = max(stretch.start - first, 0), min(stretch.stop - first, size)
            if stretch.owner == owner and start < stop:
                return start, stop
        return 0, 0


@dataclass(frozen=True)
class Sharding:
    """The buckets of a rank's parameters, in the order in which backward finishes them.

    Each rank updates parameters outside all buckets as a whole. With `matrices`, every stretch consists of whole
    matrices of a tensor, and a piece has the tensor's number of dimensions; otherwise a piece is flat. With
    `transient`, a bucket's gradients have memory only from the time when backward needs it until they are summed, and
    then a rank keeps only those that it owns. A schedule that computes weight gradients outside of a backward pass
    cannot be used with `transient`.
    """

    buckets: tuple[Bucket, ...]
    matrices: bool = False
    transient: bool = False

    @cached_property
    def of(self) -> dict[str, Bucket]:
        """The bucket of every parameter that is in one."""
        return {name: bucket for bucket in self.buckets for name in bucket.names}

    def placed(self, whole: Placement) -> "ShardedPlacement":
        """The placement of the owned parts of a parameter whose unsharded placement is `whole`."""
        mesh, bucket = whole.mesh, self.of[whole.name]
        held = [bucket.part(whole.name, owner) for owner in range(math.prod(mesh.axes[a].size for a in bucket.axes))]
        owners = {owner for owner, (start, stop) in enumerate(held) if start < stop}
        holders = tuple(rank for rank in whole.holders if owner_of(mesh, rank, bucket.axes) in owners)
        return ShardedPlacement(
            whole.name, whole.parameter, whole.shape, mesh, holders, whole, bucket, flat=not self.matrices
        )


def owner_of(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> int:
    """The number of `rank` among the ranks that differ from it only along `axes` (of one view), in rank order."""
    number = 0
    for axis in (axis for view in mesh.views.values() for axis in view if axis.name in axes):
        number = number * axis.size + mesh.index(rank, axis.name)
    return number


@dataclass(frozen=True)
class FlatBox(Box):
    """A box that its rank keeps in a flat tensor: from element `offset` on, with these `strides`."""

    strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardedPlacement(Placement):
    """The placement of a parameter whose optimizer state is sharded: each rank owns the bucket's stretch of `whole`.

    `holders` are the ranks that own at least one element. The local tensor is flat; if matrices stay whole (`flat` is
    False), it is a range of rows of the local tensor of `whole`.
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
        """The boxes of the rank's part; `copies` and `partial` are limited to the ranks that own the same part."""
        start, stop = self.part(rank)
        shape = self.whole.local_shape(rank)
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        first = (start // strides[0], *(0,) * len(shape[1:])) if shape else ()  # the first row of a matrix piece
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
    """(start, shape), in the local tensor, of the intersection of `box` and `part`; None if it is empty."""
    start = tuple(max(o, s) for o, s in zip(box.offset, part.start, strict=True))
    stop = tuple(min(o + n, s + m) for o, n, s, m in zip(box.offset, box.shape, part.start, part.shape, strict=True))
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    return None if any(length <= 0 for length in shape) else (start, shape)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes that cover elements `start` to `stop` of a row-major tensor: at most three in two dimensions.

    A rank that holds a flat range (ZeRO, arXiv 1910.02054) holds these boxes. `offset` counts elements from `start`.
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
