"""Which buckets there are, and who owns what of them: arithmetic on sizes, without torch or processes.

R ranks share a bucket. An optimizer of elements gets it in R equal ranges; an optimizer of matrices gets whole ones,
of which every rank has about as many elements.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from mplug import Bucket, Mesh, Placement, Sharding, Stretch, UsageError

if TYPE_CHECKING:
    from mplug import Model, Run
    from mplug_zero.config import ZeROConfig

ALIGNED = 64
"""Elements to whose multiples tensors begin and ranges are cut: 128 bytes of bf16, which transfers like."""


@dataclass(frozen=True)
class Item:
    """A parameter's local tensor: its `parts` are the numbers of elements that must stay together.

    `axes` are the mesh axes whose ranks own it, `copied` the others over which its gradient is partial, and one that is
    `alone` shares its bucket with none.
    """

    name: str
    parts: tuple[int, ...]
    axes: tuple[str, ...]
    copied: tuple[str, ...] = ()
    alone: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return sum(self.parts)


def sharding_of(run: "Run", model: "Model", needs: str, config: "ZeROConfig") -> Sharding | None:
    """The buckets of this rank's parameters; None where no rank shares anything."""
    if needs not in ("elements", "matrices"):
        raise UsageError(
            f"{''.join(run.hooks.implementers('build_optimizer'))} needs '{needs}' of parameters, and "
            f"zero={run.mesh.axes['zero'].size} gives each rank elements or whole matrices; use a layout without zero, "
            f"or another optimizer"
        )
    names = [name for name, parameter in model.parameters().items() if parameter.requires_grad]
    items = [item for name in reversed(names) if (item := _item(run, model, model.placements[name], needs)) is not None]
    if run.mesh.axes["zero"].size == 1 or not items:
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
    """A parameter as the layout sees it; None where no other rank's gradient is added to its own."""
    axes = owning_axes(run.mesh, placement)
    if axes is None:
        return None
    shape = placement.local_shape(run.rank)
    parts = (prod(shape),) if needs == "elements" else matrices(placement, shape)
    stages = {run.mesh.index(rank, model.stages.axis) for rank in placement.holders}
    return Item(placement.name, parts, *axes, alone=len(stages) > 1)  # ranks of both stages cut it alike


def owning_axes(mesh: Mesh, placement: Placement) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(the axes whose ranks own parts of a parameter's state, the others over which its gradient is partial).

    None where no other rank's gradient is added to a rank's own.
    """
    axes = placement.data_axes
    own = ("zero",) if "zero" in axes else axes
    if prod(mesh.axes[axis].size for axis in own) == 1:
        return None
    return own, tuple(axis for axis in axes if axis not in own)


def matrices(placement: Placement, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements of the parts of a local tensor that an optimizer of matrices may get apart: slices of the first dim.

    The segments of a fused weight, the experts of a stack; of anything else, all.
    """
    if len(shape) == 2:
        return tuple(segment.length * shape[1] for segment in placement.dims[0])
    return (prod(shape[1:]),) * shape[0] if len(shape) > 2 else (prod(shape),)


def in_buckets(items: Iterable[Item], numel: int) -> Iterator[Bucket]:
    """Items, neighbours together until they have `numel` elements; those of different ranks are apart."""
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
    return Bucket(names, tuple(starts), sizes, length, items[0].axes, (), items[0].copied)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def in_ranges(bucket: Bucket, size: int) -> Bucket:
    """The bucket in `size` equal ranges, which may cut tensors anywhere."""
    length = _padded(bucket.length, ALIGNED * size)
    each = length // size
    stretches = tuple(Stretch(owner * each, (owner + 1) * each, owner) for owner in range(size))
    return replace(bucket, length=length, stretches=stretches)


def in_matrices(
    buckets: Iterable[Bucket], parts: dict[str, tuple[int, ...]], axes: tuple[str, ...], size: int
) -> list[Bucket]:
    """Those buckets whose ranks lie along `axes`, every tensor given to owners in whole parts."""
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
    """The parts of every tensor, neighbours together, to `size` owners: the largest tensor first, to who has least.

    An owner gets of a tensor what brings it up to the average, and one part at least; nobody gets two stretches of one.
    """
    loads = [0] * size
    average = sum(map(sum, parts.values())) / size
    found: dict[str, list[Stretch]] = {}
    for name in sorted(parts, key=lambda name: (-sum(parts[name]), name)):
        found[name] = list(_stretches(parts[name], loads, average))
    return found


def _stretches(parts: Sequence[int], loads: list[int], average: float) -> Iterator[Stretch]:
    free = set(range(len(loads)))
    start, left = 0, list(parts)
    while left:
        owner = min(free, key=lambda one: (loads[one], one))
        free.discard(owner)
        stop = start
        while left and (stop == start or not free or loads[owner] + left[0] <= average):
            loads[owner] += left[0]
            stop += left.pop(0)
        yield Stretch(start, stop, owner)
        start = stop
