"""The buckets of a run and the owners of their parts: arithmetic on sizes, without torch or processes.

R ranks share a bucket. For an optimizer of elements, each rank owns one of R equal ranges. For an optimizer of
matrices, each rank owns whole matrices, with about the same number of elements on every rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from mplug import Bucket, Mesh, Placement, Sharding, Stretch, UsageError

if TYPE_CHECKING:
    from mplug import Model, Run
    from mplug_zero.config import ZeROConfig

ALIGNED = 64
"""Tensors and ranges start at multiples of this many elements: 128 bytes of bf16, a good alignment for transfers."""


@dataclass(frozen=True)
class Item:
    """A parameter's local tensor. `parts` lists, in order, the sizes of its parts in elements.

    An optimizer of matrices needs each part as a whole.

    `axes` are the mesh axes whose ranks own parts of its state. `copied` are the other axes over which its gradient is
    partial. If `alone`, its bucket contains no other tensor.
    """

    name: str
    parts: tuple[int, ...]
    axes: tuple[str, ...]
    copied: tuple[str, ...] = ()
    alone: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(self.parts)


def sharding_of(run: "Run", model: "Model", needs: str, config: "ZeROConfig") -> Sharding | None:
    """The buckets of this rank's parameters (none in a frozen stage); None where no rank shares anything."""
    if run.mesh.axes["zero"].size == 1:
        return None
    if needs not in ("elements", "matrices"):
        raise UsageError(
            f"{''.join(run.hooks.implementers('build_optimizer'))} needs '{needs}' of parameters, and "
            f"zero={run.mesh.axes['zero'].size} shards them by 'elements' or 'matrices' only; use a layout without "
            f"zero, or another optimizer"
        )
    names = [name for name, parameter in model.parameters().items() if parameter.requires_grad]
    items = [item for name in reversed(names) if (item := _item(run, model, model.placements[name], needs)) is not None]
    if not any(one.parameter.trainable and owning_axes(run.mesh, one) for one in model.placements.values()):
        return None
    buckets = list(in_buckets(items, int(config.bucket_mib * 2**18)))
    sizes = {axes: prod(run.mesh.axes[axis].size for axis in axes) for axes in {bucket.axes for bucket in buckets}}
    if needs == "elements":
        buckets = [in_ranges(bucket, sizes[bucket.axes]) for bucket in buckets]
    else:
        parts = {item.name: item.parts for item in items}
        buckets = [one for axes, size in sizes.items() for one in in_matrices(buckets, parts, axes, size)]
    last = {name: place for place, name in enumerate(reversed(names))}
    buckets.sort(key=lambda bucket: max(last[name] for name in bucket.names))
    return Sharding(tuple(buckets), matrices=needs == "matrices", transient=config.stage == 2)


def _item(run: "Run", model: "Model", placement: Placement, needs: str) -> Item | None:
    """The item of a parameter; None if its state is not divided."""
    axes = owning_axes(run.mesh, placement)
    if axes is None:
        return None
    shape = placement.local_shape(run.rank)
    parts = (prod(shape),) if needs == "elements" else matrices(placement, shape)
    is_tied = len(placement.stages) > 1  # all its stages must cut it alike
    return Item(placement.name, parts, *axes, alone=is_tied)


def owning_axes(mesh: Mesh, placement: Placement) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(the axes whose ranks own parts of a parameter's state, the other axes over which its gradient is partial).

    None if the former have one rank, so that there is nothing to divide.
    """
    axes = placement.data_axes
    own = ("zero",) if "zero" in axes else axes
    if prod(mesh.axes[axis].size for axis in own) == 1:
        return None
    return own, tuple(axis for axis in axes if axis not in own)


def matrices(placement: Placement, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes, in elements, of the parts of a local tensor that different ranks may update with an optimizer of matrices.

    The parts are slices of the first dimension: the segments of a fused weight [rows, columns], or the experts of a
    stack. Any other tensor is one part.
    """
    if len(shape) == 2:
        return tuple(segment.length * shape[1] for segment in placement.dims[0])
    return (prod(shape[1:]),) * shape[0] if len(shape) > 2 else (prod(shape),)


def in_buckets(items: Iterable[Item], numel: int) -> Iterator[Bucket]:
    """Group consecutive items into buckets of at least `numel` elements; different axes are never mixed.

    An item that is `alone` gets a bucket of its own.
    """
    held: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Item]] = {}
    for item in items:
        if item.alone:
            yield _bucket([item])
            continue
        waiting = held.setdefault((item.axes, item.copied), [])
        waiting.append(item)
        if sum(one.size for one in waiting) >= numel:
            yield _bucket(held.pop((item.axes, item.copied)))
    yield from map(_bucket, held.values())


def _bucket(items: list[Item]) -> Bucket:
    *starts, length = accumulate((_padded(item.size, ALIGNED) for item in items), initial=0)
    names, sizes = (tuple(item.name for item in items), tuple(item.size for item in items))
    return Bucket(names, tuple(starts), sizes, length, items[0].axes, copied=items[0].copied)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def in_ranges(bucket: Bucket, size: int) -> Bucket:
    """The bucket padded and cut into `size` equal ranges, one per rank; a cut may fall inside a tensor."""
    length = _padded(bucket.length, ALIGNED * size)
    return replace(bucket, length=length, num_owners=size)


def in_matrices(
    buckets: Iterable[Bucket], parts: dict[str, tuple[int, ...]], axes: tuple[str, ...], size: int
) -> list[Bucket]:
    """The buckets with these `axes`, each tensor divided among `size` owners in whole parts."""
    own = [bucket for bucket in buckets if bucket.axes == axes]
    given = owners({name: parts[name] for bucket in own for name in bucket.names}, size)
    return [
        replace(
            bucket,
            stretches=tuple(
                Stretch(start + stretch.start, start + stretch.stop, stretch.owner)
                for name, start in zip(bucket.names, bucket.starts, strict=True)
                for stretch in given[name]
            ),
        )
        for bucket in own
    ]


def owners(parts: dict[str, tuple[int, ...]], size: int) -> dict[str, list[Stretch]]:
    """Divide the parts of every tensor among `size` owners, in contiguous stretches.

    Greedy: it takes the largest tensor first, and always the owner with the smallest load. That owner gets parts of the
    tensor up to the average load, but at least one. An owner gets at most one stretch of each tensor.
    """
    loads = [(0, owner) for owner in range(size)]
    average = sum(map(sum, parts.values())) / size
    found: dict[str, list[Stretch]] = {}
    for name in sorted(parts, key=lambda name: (-sum(parts[name]), name)):
        found[name] = list(_stretches(parts[name], loads, average))
    return found


def _stretches(parts: Sequence[int], loads: list[tuple[int, int]], average: float) -> Iterator[Stretch]:
    """The stretches of one tensor; `loads` is a heap of (load, owner)."""
    start, left, done = 0, list(parts), []
    while left:
        load, owner = heappop(loads)
        stop = start
        while left and (stop == start or not loads or load + left[0] <= average):
            load += left[0]
            stop += left.pop(0)
        done.append((load, owner))
        yield Stretch(start, stop, owner)
        start = stop
    for one in done:
        heappush(loads, one)
