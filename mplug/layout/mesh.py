"""From a layout word to the mesh: axes, views and ranks, as pure data.

Nothing here starts a process or imports torch: a layout of a thousand ranks is computed and checked on a laptop.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from mplug.errors import UsageError, listed, suggest
from mplug.layout.ranks import Grouping, Ranks

Ranges = tuple[range, ...]
IndexMap = Callable[[int, int, int], Ranges]
"""(length, size, index) -> the ranges of a dimension of `length` that the `index`-th of `size` ranks holds."""


def contiguous(length: int, size: int, index: int) -> tuple[range, ...]:
    """The `index`-th of `size` equal, contiguous parts; `size` must divide `length`."""
    if length % size:
        raise UsageError(f"{size} ranks do not divide a dimension of length {length}")
    part = length // size
    return (range(index * part, (index + 1) * part),)


@dataclass(frozen=True)
class DocumentMap:
    """An index map that divides the sequence of each packed sample by the documents in it.

    `divide(lengths, size)` returns the ranges that each rank holds, in sequence order; ranks hold equally many
    positions. It is a pure function of the lengths of the documents, so all ranks compute the same. `work(lengths,
    ranges)` is the work of a rank that holds these ranges. The object itself is the index map of samples without
    documents, `static`. `note` describes the division for users, as a clause.

    The host cuts every sample of a micro batch by itself, and leaves the lengths of documents on the CPU.
    """

    static: IndexMap
    divide: Callable[[tuple[int, ...], int], tuple[Ranges, ...]]
    work: Callable[[Sequence[int], Ranges], int]
    note: str

    def __call__(self, length: int, size: int, index: int) -> Ranges:
        """The ranges of a sample without documents."""
        return self.static(length, size, index)


MOST_RANKS = 1 << 24
"""Maximum number of ranks of a layout: far more than any machine has."""
DIGITS = 18


@dataclass(frozen=True)
class Axis:
    """One way in which a strategy divides the work of a run over ranks.

    The axis divides the named axes `splits` of *parameters*, `entries` of *batch entries* and `activations` of
    activations inside the model. `entries` maps each named axis to the index map that selects a rank's indices; that
    of the sequence may be a `DocumentMap`.
    Examples of `activations`: the residual stream's sequence under sequence parallelism; heads, if the ranks divide
    what is computed by heads but not its weights. The loader divides samples into equal, contiguous parts. The host
    cuts every other axis of an entry before the first unit receives it.

    `distance` says how near its ranks must be: the axis with the smallest distance varies fastest over ranks (tensor
    parallelism inside a node), the axis with the largest varies slowest (pipeline stages). `views` are the views of the
    mesh that contain this axis; all views share the pipeline's axis. The `name` of an axis is unique.

    The ranks along an axis that divides the sequence of entries may also share streams (`mplug.Stream`): each runs the
    units of a stream on some of the segments, and the strategy brings their results together where they join the
    tokens. Along any other axis, every rank runs all segments of its samples, unless ranks balance streams
    (`parallel.balance`).

    The ranks along an `independent` axis are workers that train on their own (DiLoCo): their weights, gradients and
    optimizer states differ. Gradients, the norm, clipping and token counts are then those of one worker.
    """

    name: str
    size: int
    splits: tuple[str, ...] = ()
    entries: Mapping[str, IndexMap] = field(default_factory=dict)
    activations: tuple[str, ...] = ()
    distance: int = 0
    views: tuple[str, ...] = ("dense",)
    shares_streams: bool = False
    independent: bool = False

    def divides(self, named_axis: str) -> bool:
        """Whether ranks along this axis see different parts of `named_axis`, so that a sum over it is partial."""
        return named_axis in self.splits or named_axis in self.entries or named_axis in self.activations


def parse_layout(word: str, strategies: Iterable[str]) -> dict[str, int]:
    """'tp4pp2' -> {'tp': 4, 'pp': 2}: names of installed strategies (longest match), each with its degree."""
    names = sorted(strategies, key=len, reverse=True)
    degrees: dict[str, int] = {}
    rest = word
    while rest:
        match = re.match(f"({'|'.join(map(re.escape, names))})(\\d+)", rest) if names else None
        if match is None:
            raise UsageError(f"layout '{word}': {_why_unparsed(rest, names)}")
        name, degree = match[1], int(match[2][:DIGITS])
        if len(match[2]) > DIGITS:
            raise UsageError(
                f"the degree of '{name}' has {len(match[2])} digits; a layout has at most {MOST_RANKS:,} ranks"
            )
        if degree < 1:
            raise UsageError(f"layout '{word}': the degree of '{name}' must be at least 1, not {degree}")
        if name in degrees:
            raise UsageError(f"layout '{word}' names '{name}' twice; give it one degree")
        degrees[name] = degree
        rest = rest[match.end() :]
    return degrees


def _why_unparsed(rest: str, names: list[str]) -> str:
    letters = re.match(r"\D*", rest)
    name = letters[0] if letters else ""
    if name in names:
        return f"'{name}' needs a degree, as in '{name}2'"
    if not name:
        return f"'{rest}' does not begin with a strategy's name; write it as in 'tp4pp2'"
    similar, remedy = suggest(name, names), "; install the package that supplies it"
    if names:
        remedy = "; use one of them, or install the package that supplies it"
    return f"unknown strategy '{name}'{similar} (installed: {listed(sorted(names))}){'' if similar else remedy}"


def view_sizes(axes: Iterable[Axis]) -> dict[str, int]:
    """For each view, the product of its axes' sizes; the world size must be a multiple of each product."""
    axes = list(axes)
    views = dict.fromkeys(["dense", *(axis.views[0] for axis in axes if len(axis.views) == 1)])
    return {view: math.prod(axis.size for axis in axes if view in axis.views) for view in views}


@dataclass(frozen=True)
class Mesh:
    """Named views of one rank order; each view lists its axes from the slowest-varying to the fastest.

    Every view covers all ranks, and the views agree on the axes that they share. So the sparse view folds over the same
    ranks as the dense view, and its degrees do not multiply the world size.
    """

    world_size: int
    views: Mapping[str, tuple[Axis, ...]]

    @classmethod
    def of(cls, axes: Iterable[Axis], world_size: int) -> "Mesh":
        """Arrange axes by distance; a view that does not cover the world gets a data axis over the remaining ranks.

        Raises UsageError if the product of a view's degrees does not divide the world size.
        """
        axes = sorted(axes, key=lambda axis: (-axis.distance, axis.name))
        _refuse_shared_within(axes)
        views: dict[str, tuple[Axis, ...]] = {}
        for view, covered in view_sizes(axes).items():
            members = [axis for axis in axes if view in axis.views]
            if world_size % covered:
                degrees = " x ".join(f"{axis.name}={axis.size}" for axis in members)
                product = f" = {covered}" if len(members) > 1 else ""
                raise UsageError(f"{degrees}{product} does not divide the world size {world_size}")
            if covered < world_size:
                shared = [axis for axis in members if len(axis.views) > 1]
                data = Axis(f"{view}_data", world_size // covered, entries={"batch": contiguous}, views=(view,))
                members = [*shared, data, *(axis for axis in members if axis not in shared)]
            views[view] = tuple(members)
        return cls(world_size, views)

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """Every axis by its name."""
        return {axis.name: axis for members in self.views.values() for axis in members}

    @cached_property
    def independent(self) -> tuple[str, ...]:
        """The axes along which ranks train independently; empty if all ranks train one model."""
        return tuple(axis.name for axis in self.views["dense"] if axis.independent and axis.size > 1)

    @cached_property
    def within_worker(self) -> Grouping:
        """The ranks that train one model together: all ranks, unless some train independently."""
        if not self.independent:
            return self.everyone
        return self.grouping(*(axis.name for axis in self.views["dense"] if axis.name not in self.independent))

    def worker(self, rank: int) -> tuple[int, int]:
        """(index, count): the worker of `rank` among the independent workers."""
        return self.number(rank, self.independent), math.prod(self.axes[name].size for name in self.independent)

    def coordinates(self, rank: int, view: str = "dense") -> dict[str, int]:
        """The index of `rank` along each axis of a view."""
        indices: dict[str, int] = {}
        for axis in reversed(self.views[view]):
            rank, indices[axis.name] = divmod(rank, axis.size)
        return indices

    def index(self, rank: int, axis: str) -> int:
        """The index of `rank` along one axis; 0 along an axis that the mesh does not have."""
        return self.coordinates(rank, self._view_of(axis))[axis] if axis in self.axes else 0

    def group(self, rank: int, *axes: str) -> Ranks:
        """The ranks that differ from `rank` only along `axes` (of one view), including `rank`."""
        return self.grouping(*axes).of(rank)

    def grouping(self, *axes: str) -> Grouping:
        """The partition of all ranks into groups that differ only along `axes` (of one view)."""
        present = [axis for axis in axes if axis in self.axes]
        view = self.views[self._view_of(*present)]
        sizes = tuple(axis.size for axis in view)
        together = tuple(axis.size if axis.name in present else 1 for axis in view)
        return Grouping(tuple(axis.name for axis in view), sizes, together)

    @property
    def everyone(self) -> Grouping:
        """All ranks in one group."""
        return Grouping(("",), (self.world_size,), (self.world_size,))

    def number(self, rank: int, axes: Collection[str]) -> int:
        """The number of `rank` among the ranks that differ from it only along `axes` (of one view), in rank order."""
        number, view = 0, self._view_of(*axes)
        own = self.coordinates(rank, view)
        for axis in self.views[view]:
            if axis.name in axes:
                number = number * axis.size + own[axis.name]
        return number

    def batch_shard(self, rank: int) -> tuple[int, int]:
        """(index, count): this rank reads part `index` of the `count` equal parts of the global batch."""
        axes = [axis for axis in self.views["dense"] if "batch" in axis.entries]
        return self.number(rank, [axis.name for axis in axes]), math.prod(axis.size for axis in axes)

    def place(self, rank: int, flowing: Collection[str], weights: str) -> int:
        """The number of `rank` among the ranks that compute different parts of a result; the slowest axis counts most.

        Two ranks compute different parts if they differ along a mesh axis that divides one of the named axes `flowing`
        of the inputs, or the named axis `weights` of the weights. Ranks that differ only along other axes compute the
        same part and have the same place.
        """
        dividing = [
            axis.name
            for axis in self.views["dense"]
            if axis.divides(weights) or not {*axis.entries, *axis.activations}.isdisjoint(flowing)
        ]
        return self.number(rank, dividing)

    def _view_of(self, *axes: str) -> str:
        for view, members in self.views.items():
            if set(axes) <= {axis.name for axis in members}:
                return view
        raise ValueError(f"no view of the mesh holds all of {listed(axes)}")


def _refuse_shared_within(axes: list[Axis]) -> None:
    """Raise ValueError unless every shared axis varies slower than every axis that belongs to one view only."""
    for outer, inner in pairwise(axes):
        if len(inner.views) > 1 and len(outer.views) == 1:
            raise ValueError(
                f"axis '{inner.name}' belongs to views {listed(inner.views)}; it must be farther than '{outer.name}'"
            )
