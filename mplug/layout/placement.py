"""Placements: the boxes of a parameter on each rank, their copies, and the ranks over which gradients are partial."""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from mplug.errors import UsageError, listed
from mplug.layout.mesh import Axis, Mesh
from mplug.layout.plan import Parameter, Segment


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a logical tensor, and where a rank keeps it.

    `start` and `shape` are in the coordinates of the logical, unpadded tensor, `offset` in those of the local tensor.
    `copies` are exactly the ranks that hold the same box. Its complete gradient is the sum over the ranks `partial`.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    copies: tuple[int, ...] = (0,)
    partial: tuple[int, ...] = (0,)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Placement:
    """Where one parameter lives: for any rank, the boxes of the logical tensor that it holds.

    `holders` are the ranks that hold a part of it: the ranks of one pipeline stage, or of two for tied embeddings.
    """

    name: str
    parameter: Parameter
    shape: tuple[int, ...]
    mesh: Mesh
    holders: tuple[int, ...]

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
        """The view of the mesh that contains every axis that splits this parameter."""
        for axes in self.mesh.views.values():
            if set(self.splits.values()) <= {axis.name for axis in axes}:
                return axes
        raise UsageError(
            f"axes {listed(self.splits.values())} split '{self.name}', and no view of the mesh has them all"
        )

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the gradient is partial: they divide axes that the parameter is broadcast over."""
        return tuple(
            axis.name
            for axis in self.view
            if axis.name not in self.splits.values() and any(axis.divides(named) for named in self.parameter.over)
        )

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """Those of `partial_axes` that divide batch entries: data parallelism sums the gradient over them.

        For an expert's weight these are axes of the expert view: one may span several axes of the attention view.
        """
        axes = [self.mesh.axes[name] for name in self.partial_axes]
        return tuple(axis.name for axis in axes if any(named in axis.entries for named in self.parameter.over))

    @cached_property
    def cut_by(self) -> tuple[str, ...]:
        """Mesh axes that cut a matrix, that is, a segment along one of the last two dimensions."""
        dims = self.dims[-2:] if len(self.dims) >= 2 else ()
        cut = [
            self.splits[segment.axis]
            for dim in dims
            for segment in dim
            if self._part(segment, self.holders[0]).length < segment.length
        ]
        return tuple(dict.fromkeys(cut))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the rank's local tensor, padding included."""
        return tuple(sum(self._part(segment, rank).padded for segment in dim) for dim in self.dims)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The boxes that `rank` holds, one for each combination of segments; none if it holds nothing."""
        if rank not in self._held:
            return ()
        boxes = []
        for segments in product(*(range(len(dim)) for dim in self.dims)):
            parts = [self._located(dim, which, rank) for dim, which in zip(self.dims, segments, strict=True)]
            shape = tuple(part.length for part in parts)
            if math.prod(shape):
                chosen = [dim[which] for dim, which in zip(self.dims, segments, strict=True)]
                copies = self._same(rank, chosen)
                partial = self._partial(rank, chosen, copies)
                starts, offsets = tuple(part.start for part in parts), tuple(part.offset for part in parts)
                boxes.append(Box(starts, shape, offsets, copies, partial))
        return tuple(boxes)

    def _part(self, segment: Segment, rank: int) -> "_Part":
        axis = self.splits.get(segment.axis)
        if axis is None:
            return _Part(0, segment.length, segment.length)
        return _cut(segment, axis, self.mesh.axes[axis].size, self.mesh.index(rank, axis))

    def _located(self, dim: tuple[Segment, ...], which: int, rank: int) -> "_Part":
        part = self._part(dim[which], rank)
        before = sum(segment.length for segment in dim[:which])
        offset = sum(self._part(segment, rank).padded for segment in dim[:which])
        return _Part(before + part.start, part.length, part.padded, offset)

    def _same(self, rank: int, segments: list[Segment]) -> tuple[int, ...]:
        """The holders of the same parts; it skips ranks along axes that never leave copies."""
        own = [self._part(segment, rank) for segment in segments]
        cutting = {self.splits[s.axis] for s in segments if s.axis in self.splits and s.uneven == "refuse"}
        group = self.mesh.group(rank, *(axis.name for axis in self.view if axis.name not in cutting))
        return tuple(r for r in group if r in self._held and [self._part(segment, r) for segment in segments] == own)

    @cached_property
    def _held(self) -> frozenset[int]:
        return frozenset(self.holders)

    def _partial(self, rank: int, segments: list[Segment], copies: tuple[int, ...]) -> tuple[int, ...]:
        # Copies of an uneven segment do different work (query heads that share a KV head), so the sum includes them.
        shared = [self.splits[s.axis] for s in segments if s.axis in self.splits and s.uneven == "copy"]
        group = self.mesh.group(rank, *self.partial_axes, *shared)
        return tuple(r for r in group if r in copies)


@dataclass(frozen=True)
class _Part:
    start: int
    length: int
    padded: int
    offset: int = 0


def _cut(segment: Segment, axis: str, size: int, index: int) -> _Part:
    count, width = segment.count, segment.width
    if count % size == 0:
        each = count // size
        return _Part(index * each * width, each * width, each * width)
    if segment.uneven == "pad":
        each = -(-count // size)
        start = min(index * each, count)
        return _Part(start * width, (min(start + each, count) - start) * width, each * width)
    if segment.uneven == "copy" and size % count == 0:
        return _Part(index * count // size * width, width, width)
    divisors = [str(number) for number in range(1, count + 1) if count % number == 0]
    raise UsageError(
        f"{axis}={size} does not divide the {count} {segment.axis.replace('_', ' ')}; use {' or '.join(divisors)}"
    )
