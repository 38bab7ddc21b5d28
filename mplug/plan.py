"""The plan, which a model publishes about itself, and the placements, which say where each parameter lives.

A `Plan` is data: units, the meaning of every parameter's dimensions, the axes of every batch entry. Strategies read the
plan; they never test a parameter's name. A `Placement` is computed from the plan and the mesh, for any rank and without
processes. Gradient reduction, clipping, optimizers and checkpoints read only placements.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Literal

from mplug.errors import UsageError, listed, suggest
from mplug.mesh import Axis, Mesh
from mplug.patterns import compiled, within


@dataclass(frozen=True)
class Unit:
    """A named submodule that runs as a whole. Pipelines split a model between units; recompute and compile wrap units.

    `name` is the submodule's fully qualified name, which a split does not change. `inputs` are the positional arguments
    of `method`: activations and batch entries. `outputs` are the activations that it returns (one value, or a tuple in
    this order). `optional` are entries that only some loaders supply: keyword arguments of `method` if they are there.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    method: str = "forward"
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class Segment:
    """A range of a dimension: `count` items of `width` elements each, along one named axis.

    An item (a head with `width` = head_dim) is never cut. `uneven` applies if the ranks do not divide `count`:
    `refuse` is a UsageError, `pad` pads (a vocabulary), `copy` puts an item on several ranks (few KV heads).
    """

    axis: str
    count: int
    width: int = 1
    uneven: Literal["refuse", "pad", "copy"] = "refuse"

    @property
    def length(self) -> int:
        """Elements along the dimension."""
        return self.count * self.width


@dataclass(frozen=True)
class Init:
    """How initial values are made: `normal` with standard deviation `std`, or `constant` with `value`."""

    kind: Literal["normal", "constant"]
    std: float = 0.0
    value: float = 0.0


def axes_of(dims: Iterable[str | Segment | tuple[Segment, ...]]) -> frozenset[str]:
    """The named axes of a tensor's dimensions."""
    parts = [dim if isinstance(dim, tuple) else (dim,) for dim in dims]
    return frozenset(part if isinstance(part, str) else part.axis for dim in parts for part in dim)


@dataclass(frozen=True)
class Parameter:
    """The meaning of a parameter's dimensions, its initial values, and how it is trained.

    `dims` has one entry per dimension: a named axis, one segment, or several segments if weights are fused (QKV has
    three). `over` are the activation axes that the parameter is broadcast over: its gradient is partial over exactly
    the mesh axes that divide them. `decay` says whether weight decay applies; by default it applies to parameters with
    at least two dimensions. A parameter that is not `trainable` is frozen: it has values, a placement and a place in
    checkpoints, but no gradient, master or optimizer state.
    """

    dims: tuple[str | Segment | tuple[Segment, ...], ...]
    init: Init
    over: tuple[str, ...] = ("batch", "sequence")
    decay: bool | None = None
    trainable: bool = True

    @property
    def axes(self) -> frozenset[str]:
        """The named axes of all dimensions."""
        return axes_of(self.dims)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return len(self.dims) >= 2 if self.decay is None else self.decay


@dataclass(frozen=True)
class Buffer:
    """The meaning of a buffer's dimensions. Every element starts as `value`.

    With empty `over` it is a state: equal on all ranks that hold the same part, and saved in checkpoints. Otherwise it
    is a statistic of a step: the host zeroes it at the start, and each rank adds what it sees of the activation axes
    `over`. At the end the host replaces it by the sum over all ranks and micro batches, and calls the module's method
    `step_ended` if it has one. Metrics report that sum, divided by the step's number of targets if `per_target` is set.
    """

    dims: tuple[str | Segment | tuple[Segment, ...], ...]
    value: float = 0.0
    over: tuple[str, ...] = ()
    per_target: bool = False

    @property
    def axes(self) -> frozenset[str]:
        """The named axes of all dimensions."""
        return axes_of(self.dims)

    @property
    def is_statistic(self) -> bool:
        """Whether the buffer is a statistic, which every step counts from zero."""
        return bool(self.over)


@dataclass(frozen=True)
class Stages:
    """The units of each pipeline stage, in order, and the mesh axis that the stages lie along.

    `backward` is 'split' if the schedule computes the gradients of weights later than those of activations.
    """

    axis: str
    units: tuple[tuple[str, ...], ...]
    backward: Literal["whole", "split"] = "whole"


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a forward and backward pass (2 per multiply-add; backward is twice forward).

    `per_token` counts products with weights, `per_squared_length` attention (only the unmasked half if it is causal).
    """

    per_token: int
    per_squared_length: int

    def of(self, tokens: int, squared_lengths: int) -> int:
        """FLOPs of sequences with `tokens` tokens in total, whose squared lengths sum to `squared_lengths`."""
        return self.per_token * tokens + self.per_squared_length * squared_lengths


@dataclass(frozen=True)
class Plan:
    """The data that a model publishes about itself.

    `units` run in order. `inference` are the units that end in `logits` instead of a loss. `parameters` map patterns of
    fully qualified names ('*' matches one dotted component) to the meaning of their dimensions. `context` names the
    axes of every batch entry, `activations` those of every activation that travels between units. `tied` are groups of
    names of the same parameter; the pattern of the first name describes it. `buffers` map patterns to the modules'
    buffers, except those that the host sets itself. `mixing` maps patterns of modules to the named axes that these
    modules and their submodules mix; use it for classes of other packages, which cannot declare it (`mixes`). `frozen`
    are patterns of parameters and modules that are not trained, even if `parameters` says otherwise; the host adds the
    patterns of the config (`model.frozen`).
    """

    units: tuple[Unit, ...]
    parameters: Mapping[str, Parameter]
    context: Mapping[str, tuple[str, ...]]
    activations: Mapping[str, tuple[str, ...]]
    flops: Flops
    inference: tuple[Unit, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    mixing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    def match_buffers(self, names: Iterable[str]) -> dict[str, Buffer]:
        """Each matched buffer's entry; ValueError if a pattern matches no buffer, or two match the same buffer."""
        regexes = {pattern: compiled(pattern) for pattern in self.buffers}
        hits = [(name, pattern) for name in names for pattern, regex in regexes.items() if regex.fullmatch(name)]
        found = {name: self.buffers[pattern] for name, pattern in hits}
        if len(found) < len(hits):
            raise ValueError(f"two patterns of the plan's buffers describe one of {listed(sorted(found))}")
        if unused := set(regexes) - {pattern for _, pattern in hits}:
            raise ValueError(f"no buffer matches the plan's pattern '{min(unused)}'")
        return found

    def match(self, names: Iterable[str]) -> dict[str, Parameter]:
        """Each parameter's entry; ValueError if not exactly one pattern matches a name, or a pattern matches none."""
        regexes = {pattern: compiled(pattern) for pattern in self.parameters}
        unused, found = set(regexes), dict[str, Parameter]()
        for name in names:
            hits = [pattern for pattern, regex in regexes.items() if regex.fullmatch(name)]
            if not hits:
                raise ValueError(f"no pattern of the plan describes parameter '{name}'{suggest(name, regexes)}")
            if len(hits) > 1:
                raise ValueError(f"patterns {listed(hits)} of the plan both describe parameter '{name}'")
            unused.discard(hits[0])
            found[name] = self.parameters[hits[0]]
        if unused:
            tied = next((names for names in self.tied if set(names[1:]) & unused), None)
            if tied is not None:
                raise ValueError(
                    f"{listed(tied)} are one parameter, which the pattern of the first describes; keep that"
                )
            raise ValueError(f"no parameter matches the plan's pattern '{min(unused)}'")
        frozen = self._frozen_among(found)
        return {name: replace(one, trainable=False) if name in frozen else one for name, one in found.items()}

    def names_of(self, name: str) -> tuple[str, ...]:
        """All names of a parameter: the group that contains `name` if it is tied, else `name` alone."""
        return next((names for names in self.tied if name in names), (name,))

    def _frozen_among(self, names: Iterable[str]) -> set[str]:
        """The parameters that a pattern of `frozen` matches; a tied parameter matches by any of its names."""
        aliases = [(name, alias) for name in names for alias in self.names_of(name)]
        hits = {pattern: {n for n, alias in aliases if within(pattern).fullmatch(alias)} for pattern in self.frozen}
        if unused := [pattern for pattern, found in hits.items() if not found]:
            raise ValueError(f"no parameter or module matches the pattern '{unused[0]}' that the plan freezes")
        return set().union(*hits.values())


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
