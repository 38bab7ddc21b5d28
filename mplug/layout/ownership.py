"""Which data-parallel rank owns which optimizer state and gradients (ZeRO, arXiv 1910.02054).

A `Sharding` is data. A strategy computes it from the plan and the mesh. A bucket concatenates the local tensors of
neighbouring parameters, and every rank owns an equal part of each bucket. From a sharding the host allocates weights
and gradients, and makes the pieces that the optimizer updates. Initialisation, the norm and checkpoints read only the
placements of the pieces, which describe a flat range of a tensor as boxes, like any other part.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from mplug.errors import listed
from mplug.layout.placement import Box, Placement, facts_of


@dataclass(frozen=True)
class Bucket:
    """Flattened local tensors in one flat range: those of `names` begin at `starts` and have `sizes` elements.

    Elements between them, and after the last up to `length`, are padding. The ranks along the mesh axes `axes` hold the
    same bucket; they own `num_owners` equal parts of it, in order. A cut may fall inside a tensor. `copied` are the
    other axes over which the gradients are partial.
    """

    names: tuple[str, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    length: int
    axes: tuple[str, ...]
    num_owners: int
    copied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_owners < 1 or self.length % self.num_owners:
            raise ValueError(
                f"the bucket of '{self.names[0]}' has {self.length} elements, and num_owners={self.num_owners} does "
                f"not divide it into equal parts"
            )

    @property
    def num_owned(self) -> int:
        """The number of elements that each owner owns."""
        return self.length // self.num_owners

    def owned(self, owner: int) -> slice:
        """The elements of the bucket that the owner owns."""
        return slice(owner * self.num_owned, (owner + 1) * self.num_owned)

    def part(self, name: str, owner: int) -> tuple[int, int]:
        """(start, stop): the elements of the flat tensor that the owner owns; (0, 0) if it owns none."""
        (first, size), own = self._places[name], self.owned(owner)
        start, stop = max(own.start - first, 0), min(own.stop - first, size)
        return (start, stop) if start < stop else (0, 0)

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        return dict(zip(self.names, zip(self.starts, self.sizes, strict=True), strict=True))


@dataclass(frozen=True)
class Engine:
    """The memory of an engine of another framework that keeps masters, optimizer states and gradients of a run itself.

    `num_bytes` maps kinds of memory ("masters", or "masters, in files" if they are not in memory) to their bytes on a
    rank. The optimizer's states are not included. `mplug explain` adds these, and the kinds that `num_bytes` does not
    list. `making_states()` is a context in which the host builds the optimizer: an engine can choose there where new
    states are.
    """

    num_bytes: Mapping[str, int]
    making_states: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Sharding:
    """The buckets of a rank's parameters, in the order in which backward finishes them.

    Each rank updates parameters outside all buckets as a whole. A piece of a parameter in a bucket is flat. With
    `transient`, a bucket's gradients have memory only from the time when backward needs it until they are summed, and
    then a rank keeps only those that it owns. A schedule that computes weight gradients outside of a backward pass
    cannot be used with `transient`.

    With `engine`, the strategy declines gradient sinks, and supplies the step and the pieces. The host allocates the
    weights only, and autograd gives every parameter an ordinary `.grad`. In `wrap_model`, the strategy calls
    `model.supply` with this rank's pieces: their masters are in the memory of the engine, their gradients have values
    during an update, their `weight` is None, and their placements are `Sharding.placed`. None of this memory may move.
    A `WeightExchange` in `model.exchanges` writes the masters into the weights. Every trained parameter is in a bucket
    whose `axes` are its `Placement.data_axes`, and the same plugin implements `build_stepper`.
    """

    buckets: tuple[Bucket, ...]
    transient: bool = False
    engine: Engine | None = None

    @cached_property
    def of(self) -> dict[str, Bucket]:
        """The bucket of every parameter that is in one."""
        return {name: bucket for bucket in self.buckets for name in bucket.names}

    def placed(self, whole: Placement) -> "ShardedPlacement":
        """The placement of the owned parts of a parameter whose unsharded placement is `whole`."""
        bucket = self.of[whole.name]
        ranks = math.prod(whole.mesh.axes[axis].size for axis in bucket.axes)
        if bucket.num_owners != ranks:
            raise ValueError(
                f"the bucket of '{whole.name}' is for {bucket.num_owners} owners, and axes {listed(bucket.axes)} have "
                f"{ranks} ranks"
            )
        by_owner = replace(whole, apart=(*whole.apart, *bucket.axes))
        return ShardedPlacement(**facts_of(by_owner), whole=by_owner, bucket=bucket)


@dataclass(frozen=True)
class FlatBox(Box):
    """A box that its rank keeps in a flat tensor: from element `offset` on, with these `strides`."""

    strides: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShardedPlacement(Placement):
    """The placement of a parameter whose optimizer state is sharded: each rank owns a range of a flat tensor.

    A rank that owns no element does not hold it.
    """

    whole: Placement
    bucket: Bucket

    def part(self, rank: int) -> tuple[int, int]:
        """(start, stop) of the rank's part of the flat local tensor."""
        return self.bucket.part(self.name, self.mesh.number(rank, self.bucket.axes))

    def holds(self, rank: int) -> bool:
        """Whether the rank owns an element."""
        start, stop = self.part(rank)
        return start < stop and self.whole.holds(rank)

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        """Those of `whole`."""
        return self.whole.partial_axes

    def after_summing(self, axes: Iterable[str]) -> Self:
        """The placement after the gradient has been summed over `axes`."""
        return replace(self, whole=self.whole.after_summing(axes))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the part: [elements]."""
        start, stop = self.part(rank)
        return (stop - start,)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The boxes of the rank's part; `copies` and `partial` are limited to the ranks that own the same part."""
        start, stop = self.part(rank)
        shape = self.whole.local_shape(rank)
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        found: list[Box] = []
        for box in self.whole.boxes(rank) if start < stop else ():
            for part in flat_boxes(shape, start, stop):
                if (cut := _overlap(box, part)) is None:
                    continue
                where, length = cut
                begin = tuple(s + w - o for s, w, o in zip(box.start, where, box.offset, strict=True))
                at = sum(w * stride for w, stride in zip(where, strides, strict=True)) - start
                found.append(FlatBox(begin, length, (at,), box.copies, box.partial, strides))
        return tuple(found)


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
