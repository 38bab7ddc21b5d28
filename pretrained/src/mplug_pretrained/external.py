"""External names: which tensors of a published checkpoint hold which regions of our parameters. Data only.

A family declares them in its plan (`Plan.external`). The package that reads published checkpoints expands the
declarations to one `Link` for each pair of regions.
"""

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from mplug.layout.names import starred


@dataclass(frozen=True)
class Factor:
    """A factor of a dimension: of its `size` indices, the `count` indices start, start + step, start + 2 step, ...

    Factors with the same `label` on both sides of a map are the same index, so their counts are equal. `count` None
    means all indices from `start` on.
    """

    label: str
    size: int
    start: int = 0
    count: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        if self.count is None and self.step > 0:
            object.__setattr__(self, "count", -(-(self.size - self.start) // self.step))
        count = self.count or 0
        if self.step < 1 or count < 1 or not 0 <= self.start <= self.start + (count - 1) * self.step < self.size:
            raise ValueError(f"{self} has indices outside of its size {self.size}")

    @property
    def length(self) -> int:
        """The number of selected indices."""
        assert self.count is not None
        return self.count


Dims = tuple[tuple[Factor, ...], ...]
"""Per dimension of a tensor its factors: the dimension's index is the row-major index of the factors' indices."""


@dataclass(frozen=True)
class ExternalMap:
    """A region of our parameter and the region of a public tensor that holds its values, factor by factor.

    This is the general form: it permutes, transposes, reshapes and strides. A label in braces in the tensor's name
    ('blocks.{e}.w1') says that there is one public tensor for each index of this factor of ours. A factor without a
    partner on the other side selects a single index.
    """

    ours: Dims
    tensor: str
    theirs: Dims


@dataclass(frozen=True)
class Transposed:
    """A public tensor whose last two dimensions are swapped (GPT-2 stores [in, out])."""

    tensor: str


Source = str | Transposed
"""One public tensor. '{}' in its name is the index along our dimension 0: one public tensor for each index."""


@dataclass(frozen=True, init=False)
class Fused:
    """Ours is the concatenation of these tensors, along the one dimension to which the plan gives several segments."""

    sources: tuple[Source, ...]

    def __init__(self, *sources: Source) -> None:
        object.__setattr__(self, "sources", sources)


@dataclass(frozen=True)
class Interleaved:
    """A public tensor that holds our segments item by item: with segments gate and up, [gate 0, up 0, gate 1, ...]."""

    source: Source


External = Source | Fused | Interleaved | tuple[ExternalMap, ...] | None
"""Where published checkpoints keep a parameter. A name alone: a tensor of the same shape. None: they do not have it."""


@dataclass(frozen=True)
class ScoreHead:
    """A head that computes scores in place of the logits of a vocabulary: our names of both weights.

    `labels` are the names of the scores. A folder may lack either weight, which then keeps its initial values: that of
    a language model has no scores, and that of a classifier has no projection. An export has the scores alone.
    """

    weight: str
    replaced: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class ExternalNames:
    """The published form of a model's parameters and states.

    `tensors` maps patterns of our parameters and of the states of modules to the public tensors. The k-th '*' of a
    public name stands for the text that the k-th '*' of the pattern matches. Exactly one pattern matches each parameter
    and each state, and each pattern matches one.

    If a parameter is tied, the public tensors of its later names are copies. `copies` maps further public tensors to
    the parameter whose values they repeat. Copies may be in a folder, must then be equal to what they repeat, and are
    not exported.

    Folders that were saved from the model without its head lack `prefix` in all names. `ignored` are patterns of public
    tensors, or of modules, that the model does not need ('*' matches one component). `optional` maps patterns of public
    modules that the model does not need to a tensor; they are ignored only in folders that have this tensor.

    `alternatives` maps the beginning of public names to another one that some folders have in its place. `endings` maps
    the end of public names to another one that some folders have in its place. `scores` is the head of a model that
    computes scores.
    """

    tensors: Mapping[str, External]
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    alternatives: Mapping[str, str] = field(default_factory=dict)
    endings: Mapping[str, str] = field(default_factory=dict)
    scores: ScoreHead | None = None

    def public_names(self, stored: Collection[str], public: Container[str]) -> dict[str, str]:
        """The public name of each tensor of a folder, by its name there, if the model has the names `public`."""
        names = {name: self._with_usual_end(name) for name in stored}
        begins = [("", self.prefix)] if self.prefix else []
        begins += [(other, usual) for usual, other in self.alternatives.items()]
        for other, usual in begins:
            if any(name.startswith(usual) for name in stored):
                continue
            for name, found in names.items():
                if found not in public and found.startswith(other):
                    names[name] = usual + found.removeprefix(other)
        return names

    def _with_usual_end(self, name: str) -> str:
        ends = ((usual, other) for usual, other in self.endings.items() if name.endswith(other))
        return next((name.removesuffix(other) + usual for usual, other in ends), name)

    def of(self, name: str) -> External:
        """The public tensors of one parameter, with the stars of their names filled in; None if there are none."""
        for pattern, external in self.tensors.items():
            if hit := starred(pattern).fullmatch(name):
                return _filled(external, hit.groups())
        return None

    def renamed(self, rename: Callable[[str], str]) -> "ExternalNames":
        """The same parameters with other public names: each name and pattern is replaced by what `rename` returns."""
        return ExternalNames(
            {ours: _renamed(theirs, rename) for ours, theirs in self.tensors.items()},
            self.prefix,
            tuple(map(rename, self.ignored)),
            {rename(public): ours for public, ours in self.copies.items()},
            {rename(pattern): rename(sign) for pattern, sign in self.optional.items()},
            {rename(usual): rename(other) for usual, other in self.alternatives.items()},
            self.endings,
            self.scores,
        )


def substituted(public: str, texts: Iterable[str]) -> str:
    """A public name whose k-th star is replaced by the k-th text."""
    for text in texts:
        public = public.replace("*", text, 1)
    return public


def _filled(external: External, texts: tuple[str, ...]) -> External:
    """An external name with the texts that the stars of its pattern match."""
    return _renamed(external, lambda public: substituted(public, texts))


def _renamed(external: External, rename: Callable[[str], str]) -> External:
    if isinstance(external, str | Transposed):
        return _source(external, rename)
    if isinstance(external, Fused):
        return Fused(*(_source(source, rename) for source in external.sources))
    if isinstance(external, Interleaved):
        return Interleaved(_source(external.source, rename))
    if external is None:
        return None
    return tuple(replace(one, tensor=rename(one.tensor)) for one in external)


def _source(source: Source, rename: Callable[[str], str]) -> Source:
    return Transposed(rename(source.tensor)) if isinstance(source, Transposed) else rename(source)


# The expanded form.


@dataclass(frozen=True)
class Part:
    """A region of a tensor: the tensor's name, and the selected indices of the factors of its dimensions."""

    tensor: str
    dims: Dims

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(prod(factor.size for factor in dim) for dim in self.dims)

    @cached_property
    def numel(self) -> int:
        """The number of elements of the region."""
        return prod(factor.length for factor in self.factors.values())

    @cached_property
    def factors(self) -> dict[str, Factor]:
        """The factors of all dimensions by label."""
        return {factor.label: factor for dim in self.dims for factor in dim}


@dataclass(frozen=True)
class Link:
    """A region of our tensor, and the region of a public tensor that has its values.

    With `fan`, the label of a factor of ours, there is one public tensor for each index of this factor; the name in
    `theirs` then contains the label in braces.
    """

    ours: Part
    theirs: Part
    fan: str | None = None

    def __post_init__(self) -> None:
        ours, theirs = self.ours.factors, self.theirs.factors
        if len(ours) < sum(map(len, self.ours.dims)) or len(theirs) < sum(map(len, self.theirs.dims)):
            raise ValueError(f"a map of '{self.ours.tensor}' has two factors with the same label in one tensor")
        for label in ours.keys() | theirs.keys():
            counts = {side[label].length for side in (ours, theirs) if label in side}
            alone = (label in ours) != (label in theirs)
            if len(counts) > 1 or (alone and counts != {1} and label != self.fan):
                raise ValueError(
                    f"the map of '{self.ours.tensor}' to '{self.theirs.tensor}' selects different numbers of indices "
                    f"of the factor '{label}'"
                )
        if self.fan is not None and (self.fan not in ours or self.fan in theirs):
            raise ValueError(
                f"'{self.theirs.tensor}' has the label '{self.fan}' in braces, which must be a factor of "
                f"'{self.ours.tensor}' and not one of the public tensor"
            )

    def public(self, index: int) -> str:
        """The public tensor for an index, among the selected ones, of the factor `fan`; without `fan`, the only one."""
        if self.fan is None:
            return self.theirs.tensor
        factor = self.ours.factors[self.fan]
        return self.theirs.tensor.replace(f"{{{self.fan}}}", str(factor.start + factor.step * index))

    @property
    def fanned(self) -> range:
        """The indices for `public`."""
        return range(1 if self.fan is None else self.ours.factors[self.fan].length)
