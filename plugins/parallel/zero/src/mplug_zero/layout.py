"""The buckets of a run: arithmetic on sizes, without torch or processes.

R ranks share a bucket. Each of them owns one of R equal ranges, which may begin inside a tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from mplug import Bucket, Mesh, Placement, Sharding

if TYPE_CHECKING:
    from mplug import Model, Run
    from mplug_zero.config import Over, ZeROConfig

ALIGNED = 64
"""Tensors and ranges start at multiples of this many elements: 128 bytes of bf16, a good alignment for transfers."""


@dataclass(frozen=True)
class Item:
    """A parameter's local tensor of `size` elements.

    `axes` are the mesh axes whose ranks own parts of its state. `copied` are the other axes over which its gradient is
    partial. If `alone`, its bucket contains no other tensor.
    """

    name: str
    size: int
    axes: tuple[str, ...]
    copied: tuple[str, ...] = ()
    alone: bool = False


def sharding_of(run: "Run", model: "Model", config: "ZeROConfig") -> Sharding | None:
    """The buckets of this rank's parameters (none in a frozen stage); None where no rank shares anything."""
    if not divides(run.mesh, config):
        return None
    names = [name for name, parameter in model.parameters().items() if parameter.requires_grad]
    items = [item for name in reversed(names) if (item := _item(run, model.placements[name], config.over)) is not None]
    if not any(
        one.parameter.trainable and owning_axes(run.mesh, one, config.over) for one in model.placements.values()
    ):
        return None
    sizes = {axes: prod(run.mesh.axes[axis].size for axis in axes) for axes in {item.axes for item in items}}
    buckets = list(in_buckets(items, int(config.bucket_mib * 2**18), sizes))
    last = {name: place for place, name in enumerate(reversed(names))}
    buckets.sort(key=lambda bucket: max(last[name] for name in bucket.names))
    return Sharding(tuple(buckets), transient=config.stage == 2)


def divides(mesh: Mesh, config: "ZeROConfig") -> bool:
    """Whether ranks may own parts of states at all."""
    return mesh.axes["zero"].size > 1 or config.over == "data"


def _item(run: "Run", placement: Placement, over: "Over") -> Item | None:
    """The item of a parameter; None if its state is not divided."""
    axes = owning_axes(run.mesh, placement, over)
    if axes is None:
        return None
    is_tied = len(placement.stages) > 1  # all its stages must cut it alike
    return Item(placement.name, prod(placement.local_shape(run.rank)), *axes, alone=is_tied)


def owning_axes(mesh: Mesh, placement: Placement, over: "Over") -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(the axes whose ranks own parts of a parameter's state, the other axes over which its gradient is partial).

    None if the former have one rank, so that there is nothing to divide.
    """
    axes = placement.data_axes
    own = ("zero",) if "zero" in axes and over == "zero" else axes
    if prod(mesh.axes[axis].size for axis in own) == 1:
        return None
    return own, tuple(axis for axis in axes if axis not in own)


def in_buckets(items: Iterable[Item], numel: int, owners: Mapping[tuple[str, ...], int]) -> Iterator[Bucket]:
    """Group consecutive items into buckets of at least `numel` elements; different axes are never mixed.

    An item that is `alone` gets a bucket of its own. `owners` is the number of ranks along axes: each owns an equal
    range of a bucket, which is padded to the right length.
    """
    held: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Item]] = {}
    for item in items:
        if item.alone:
            yield _bucket([item], owners)
            continue
        waiting = held.setdefault((item.axes, item.copied), [])
        waiting.append(item)
        if sum(one.size for one in waiting) >= numel:
            yield _bucket(held.pop((item.axes, item.copied)), owners)
    yield from (_bucket(waiting, owners) for waiting in held.values())


def _bucket(items: list[Item], owners: Mapping[tuple[str, ...], int]) -> Bucket:
    *starts, end = accumulate((_padded(item.size, ALIGNED) for item in items), initial=0)
    names, sizes = (tuple(item.name for item in items), tuple(item.size for item in items))
    axes, number = items[0].axes, owners[items[0].axes]
    return Bucket(names, tuple(starts), sizes, _padded(end, ALIGNED * number), axes, number, items[0].copied)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
