"""Placements: where a parameter lives, as facts about mesh axes, and what one rank holds by these facts."""

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Self

from mplug.errors import UsageError, listed
from mplug.layout.mesh import Axis, Mesh
from mplug.layout.plan import Parameter, Segment
from mplug.layout.ranks import Grouping, Ranks

ALONE = Ranks(0)


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a logical tensor, and where a rank keeps it.

    `start` and `shape` are in the coordinates of the logical, unpadded tensor, `offset` in those of the local tensor.
    `copies` are exactly the ranks that hold the same box, of those that train one model together. Its complete gradient
    is the sum over the ranks `partial`.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    copies: Ranks = ALONE
    partial: Ranks = ALONE

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Cut:
    """A segment of a dimension, and how a mesh axis shards it.

    The axis' index i holds `each` items, from item (i // `copies`) * `each` on. With `copies` > 1, so many consecutive
    indices hold the same items. If the indices do not divide the items, the last ones hold fewer, and padding. Without
    an axis, every rank holds all items. The segment begins at `start` in the logical tensor, at `offset` in local ones.
    """

    segment: Segment
    axis: str | None
    each: int
    copies: int
    start: int
    offset: int

    @property
    def local_length(self) -> int:
        """Elements along the dimension of a local tensor, padding included."""
        return self.each * self.segment.width

    def range_at(self, index: int) -> tuple[int, int]:
        """(start, length), in the logical tensor, of what an index of the axis holds."""
        first = min(index // self.copies * self.each, self.segment.count)
        last = min(first + self.each, self.segment.count)
        return self.start + first * self.segment.width, (last - first) * self.segment.width


def _shares(segment: Segment, axis: Axis) -> tuple[int, int]:
    """(`each`, `copies`) of a cut; UsageError if the axis does not divide the segment."""
    count, size = segment.count, axis.size
    if count % size == 0 or segment.uneven == "pad":
        return -(-count // size), 1
    if segment.uneven == "copy" and size % count == 0:
        return 1, size // count
    divisors = [str(number) for number in range(1, count + 1) if count % number == 0]
    raise UsageError(
        f"{axis.name}={size} does not divide the {count} {segment.axis.replace('_', ' ')}; use {' or '.join(divisors)}"
    )


@dataclass(frozen=True)
class Region:
    """A combination of one segment per dimension; a rank holds at most one box of it.

    `copies` groups the ranks that hold the same box. `partial` groups the ranks whose gradients add up to that of the
    box.
    """

    cuts: tuple[Cut, ...]
    copies: Grouping
    partial: Grouping


@dataclass(frozen=True)
class Placement:
    """Where one parameter lives: which mesh axes shard it, along which ranks hold copies, over which to sum.

    `stages` are the indices along `stage_axis` whose ranks hold it: one pipeline stage, or two for tied embeddings. On
    an axis that the mesh does not have, every rank has index 0. Along the axes in `apart`, ranks keep different parts
    of what would be copies (rows at rest, ranges of an optimizer's state). Over those in `summed`, the gradient is
    complete before the gradient sink receives it. `beside` are axes that split what it is used with: the weights
    that multiply the rows, for a statistic of these rows.

    Everything about one rank follows from these facts, in a time that does not depend on the number of ranks.
    """

    name: str
    parameter: Parameter
    shape: tuple[int, ...]
    mesh: Mesh
    _: KW_ONLY
    stage_axis: str = ""
    stages: tuple[int, ...] = (0,)
    apart: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements of the logical tensor."""
        return math.prod(self.shape)

    @property
    def gathered_along(self) -> str | None:
        """The mesh axis whose ranks shard the rows at rest: the local tensor is then the fp32 master of its rows.

        The local tensor of a frozen parameter, which has no master, has the precision of the run.
        """
        return None

    @property
    def offloaded(self) -> bool:
        """Whether the local tensor is in CPU memory, even if the run's device is a GPU."""
        return False

    @property
    def gathers_copies(self) -> bool:
        """Whether ranks gather the copies of the weight that a product reads, instead of the weight."""
        return False

    # The facts.

    @cached_property
    def dims(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each dimension."""
        return tuple(
            (Segment(dim, length),) if isinstance(dim, str) else (dim,) if isinstance(dim, Segment) else dim
            for dim, length in zip(self.parameter.dims, self.shape, strict=True)
        )

    @cached_property
    def splits(self) -> dict[str, str]:
        """Named axes of this parameter -> the mesh axis that splits them."""
        found: dict[str, str] = {}
        dims: dict[str, int] = {}
        for number, dim in enumerate(self.dims):
            for named in {segment.axis for segment in dim}:
                for axis in self.mesh.axes.values():
                    if named not in axis.splits:
                        continue
                    if found.setdefault(named, axis.name) != axis.name:
                        raise UsageError(
                            f"axes '{found[named]}' and '{axis.name}' both split the {named} of '{self.name}'"
                        )
                    if dims.setdefault(axis.name, number) != number:
                        raise UsageError(f"axis '{axis.name}' splits two dimensions of '{self.name}'; it may split one")
        return found

    @cached_property
    def view(self) -> tuple[Axis, ...]:
        """The view of the mesh with every axis that splits this parameter, or a named axis that it is broadcast over.

        It also contains the axes `beside`, and the pipeline's axis.
        """
        over = self.parameter.over
        partial = [one.name for one in self.mesh.axes.values() if one.size > 1 and not set(one.splits).isdisjoint(over)]
        splitting = dict.fromkeys((*self.splits.values(), *partial, *self.beside))
        views = [axes for axes in self.mesh.views.values() if splitting.keys() <= {axis.name for axis in axes}]
        if not views:
            raise UsageError(
                f"axes {listed(splitting)} split '{self.name}' or what it is broadcast over, and no view of the mesh "
                f"has them all"
            )
        axis = self.mesh.axes.get(self.stage_axis)
        if axis is not None and axis.size > 1 and axis not in views[0]:
            raise ValueError(f"the pipeline's axis '{axis.name}' must be in every view of the mesh: set Axis.views")
        return views[0]

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the gradient is partial: they divide axes that the parameter is broadcast over."""
        done = {*self.splits.values(), *self.summed, *self.mesh.independent}
        return tuple(
            axis.name
            for axis in self.view
            if axis.name not in done and any(axis.divides(named) for named in self.parameter.over)
        )

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """Those of `partial_axes` that divide batch entries: data parallelism sums the gradient over them.

        Axes of the sparse view may each span several axes of the dense view.
        """
        axes = [self.mesh.axes[name] for name in self.partial_axes]
        return tuple(axis.name for axis in axes if any(named in axis.entries for named in self.parameter.over))

    @cached_property
    def cuts(self) -> tuple[tuple[Cut, ...], ...]:
        """The segments of each dimension, and how they are sharded; UsageError if an axis does not divide one."""
        dims = []
        for dim in self.dims:
            found, start, offset = list[Cut](), 0, 0
            for segment in dim:
                axis = self.splits.get(segment.axis)
                shares = (segment.count, 1) if axis is None else _shares(segment, self.mesh.axes[axis])
                found.append(Cut(segment, axis, *shares, start, offset))
                start, offset = start + segment.length, offset + found[-1].local_length
            dims.append(tuple(found))
        return tuple(dims)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Every combination of segments, with its copies and the groups over which its gradient is partial."""
        return tuple(self._region(cuts) for cuts in product(*self.cuts))

    def sharing(self, num_dims: int) -> Grouping:
        """The groups of ranks that hold parts and copies of the same blocks of the last `num_dims` dimensions.

        A group spans every axis of the view but those that cut the dimensions before them, and all `stages`. The ranks
        of a group train one model together.
        """
        stacked = self.cuts[: max(0, len(self.shape) - num_dims)]
        apart = {cut.axis for dim in stacked for cut in dim}.union(self.mesh.independent)
        together: dict[str, int | tuple[int, ...]] = {
            axis.name: 1 if axis.name in apart else axis.size for axis in self.view
        }
        return self._grouping(together)

    def after_summing(self, axes: Iterable[str]) -> Self:
        """The placement after the gradient has been summed over `axes`."""
        return replace(self, summed=(*self.summed, *axes))

    # One rank.

    def holds(self, rank: int) -> bool:
        """Whether the rank's stage has the parameter; its part may still be empty (padding)."""
        return self.mesh.index(rank, self.stage_axis) in self.stages

    @property
    def holders(self) -> tuple[int, ...]:
        """Every rank that holds it; asks each rank of the mesh."""
        return tuple(filter(self.holds, range(self.mesh.world_size)))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the rank's local tensor, padding included."""
        return tuple(sum(cut.local_length for cut in dim) for dim in self.cuts)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The boxes that `rank` holds, one for each combination of segments; none if it holds nothing."""
        if not self.holds(rank):
            return ()
        own = {axis: self.mesh.index(rank, axis) for axis in self.splits.values()}
        boxes = []
        for region in self.regions:
            ranges = [cut.range_at(own[cut.axis] if cut.axis else 0) for cut in region.cuts]
            start, shape = tuple(start for start, _ in ranges), tuple(length for _, length in ranges)
            if math.prod(shape):
                offset = tuple(cut.offset for cut in region.cuts)
                boxes.append(Box(start, shape, offset, region.copies.of(rank), region.partial.of(rank)))
        return tuple(boxes)

    def _region(self, cuts: tuple[Cut, ...]) -> Region:
        """Copies have the same index along each axis that cuts. The gradients of a KV head's copies are partial."""
        together: dict[str, int | tuple[int, ...]] = {axis.name: axis.size for axis in self.view}
        together |= dict.fromkeys((*self.apart, *self.mesh.independent), 1) | {
            cut.axis: cut.copies for cut in cuts if cut.axis
        }
        summing = {*self.partial_axes, *(cut.axis for cut in cuts if cut.copies > 1)}
        copies = self._grouping(together)
        return Region(cuts, copies, copies.without(axis.name for axis in self.view if axis.name not in summing))

    def _grouping(self, together: dict[str, int | tuple[int, ...]]) -> Grouping:
        """Groups of ranks in the view that span `together` of each axis, and the stages that hold the parameter."""
        if len(self.stages) != together.get(self.stage_axis, 1):
            together[self.stage_axis] = self.stages if len(self.stages) > 1 else 1
        names, sizes = tuple(axis.name for axis in self.view), tuple(axis.size for axis in self.view)
        return Grouping(names, sizes, tuple(together[name] for name in names))


def facts_of(placement: Placement) -> dict[str, Any]:
    """The facts of a placement by name, to make a placement of another class."""
    return {name: getattr(placement, name) for name in Placement.__dataclass_fields__}
