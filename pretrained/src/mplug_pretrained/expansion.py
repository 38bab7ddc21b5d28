"""From a plan's external names to one link for each pair of regions, for all parameters of a model."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, product

from mplug.errors import listed, suggest
from mplug.layout.names import starred, within
from mplug.layout.placement import Placement
from mplug_pretrained.external import (
    Dims,
    External,
    ExternalMap,
    ExternalNames,
    Factor,
    Interleaved,
    Link,
    Part,
    Source,
    Transposed,
    substituted,
)

FAN = re.compile(r"\{(\w*)\}")
"""The label in braces in a public name; '{}' is the factor of our dimension 0."""


@dataclass(frozen=True)
class Target:
    """A place in a public tensor: a link, and the index of the factor `fan` of this tensor."""

    link: Link
    index: int


@dataclass(frozen=True)
class Conversion:
    """The published form of a whole model.

    `links` has the links of each parameter and state, by our names, and `absent` those that published checkpoints do
    not have. `copies` has the links of further public tensors that repeat a parameter: those of a tied parameter's
    later names, and those that the family declares as copies.
    """

    names: ExternalNames
    links: Mapping[str, tuple[Link, ...]]
    absent: frozenset[str]
    copies: Mapping[str, tuple[Link, ...]]

    @cached_property
    def public(self) -> dict[str, tuple[Target, ...]]:
        """The links of every public tensor, in the order of the model."""
        found: dict[str, list[Target]] = {}
        for links in self.links.values():
            for link in links:
                for index in link.fanned:
                    found.setdefault(link.public(index), []).append(Target(link, index))
        return {name: tuple(targets) for name, targets in found.items()}

    @cached_property
    def duplicates(self) -> dict[str, Link]:
        """The link of every public tensor that repeats a parameter."""
        links = [link for group in self.copies.values() for link in group]
        return {link.public(index): link for link in links for index in link.fanned}

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a public tensor."""
        link = self.public[tensor][0].link if tensor in self.public else self.duplicates[tensor]
        return link.theirs.shape

    def ignores(self, tensor: str, present: Container[str]) -> bool:
        """Whether the model does not need a public tensor of a folder with the tensors `present`."""
        return tensor in self.duplicates or any(
            regex.fullmatch(tensor) and (sign is None or sign in present) for regex, sign in self._ignored
        )

    def present_in(self, stored: Container[str]) -> "Conversion":
        """Without the scores, or the projection that they replace, if a folder with the tensors `stored` lacks them."""
        head = self.names.scores
        both = () if head is None else (head.weight, head.replaced)
        return self._without(name for name in both if not any(one in stored for one in self._tensors_of(name)))

    def written(self) -> "Conversion":
        """What an export has: without a projection that scores replace."""
        return self if self.names.scores is None else self._without([self.names.scores.replaced])

    def _tensors_of(self, name: str) -> list[str]:
        return [link.public(index) for link in self.links.get(name, ()) for index in link.fanned]

    def _without(self, names: Iterable[str]) -> "Conversion":
        dropped = set(names)
        return replace(self, links={name: links for name, links in self.links.items() if name not in dropped})

    @cached_property
    def _ignored(self) -> list[tuple[re.Pattern[str], str | None]]:
        """Patterns, and the tensor that must be present for them."""
        always = [(within(pattern), None) for pattern in self.names.ignored]
        return [*always, *((within(pattern), sign) for pattern, sign in self.names.optional.items())]


def conversion_of(
    names: ExternalNames, placements: Mapping[str, Placement], tied: Iterable[tuple[str, ...]] = ()
) -> Conversion:
    """The published form of the parameters and states with these placements.

    Raises ValueError if the names do not describe every parameter and state exactly once, or if their public tensors
    overlap or have gaps.
    """
    aliases = {alias: group[0] for group in tied for alias in group[1:]}
    regexes = {pattern: starred(pattern) for pattern in names.tensors}
    links, absent, unused = dict[str, tuple[Link, ...]](), set[str](), set(regexes)
    copies: dict[str, tuple[Link, ...]] = {}
    for name in [*placements, *aliases]:
        hits = [(pattern, hit) for pattern, regex in regexes.items() if (hit := regex.fullmatch(name))]
        if len(hits) > 1:
            raise ValueError(f"patterns {listed(pattern for pattern, _ in hits)} both give '{name}' an external name")
        if not hits:
            if name in aliases:
                continue
            raise ValueError(
                f"the external names lack '{name}'{suggest(name, regexes)}; give it a public name, or None if "
                f"published checkpoints do not have it"
            )
        (pattern, hit) = hits[0]
        unused.discard(pattern)
        found = tuple(_links(name, placements[aliases.get(name, name)], names.tensors[pattern], hit.groups()))
        if name in aliases:
            copies[aliases[name]] = (*copies.get(aliases[name], ()), *found)
        elif found:
            _refuse_gaps(name, placements[name].numel, found)
            links[name] = found
        else:
            absent.add(name)
    if unused:
        raise ValueError(f"no parameter or state matches '{min(unused)}' of the external names")
    for tensor, repeated in names.copies.items():
        name = aliases.get(repeated, repeated)
        if name not in links:
            raise ValueError(f"'{tensor}' is declared as a copy of '{repeated}', which has no public tensor")
        copies[name] = (*copies.get(name, ()), *_links(name, placements[name], tensor, ()))
    conversion = Conversion(names, links, frozenset(absent), copies)
    _refuse_uncovered(conversion)
    if both := sorted(conversion.public.keys() & conversion.duplicates.keys()):
        raise ValueError(f"'{both[0]}' is a public tensor and a copy of one")
    return conversion


def _links(name: str, placement: Placement, external: External, texts: tuple[str, ...]) -> Iterator[Link]:
    for one in _maps(name, placement, external):
        tensor = _substituted(one.tensor, texts, name)
        fans = FAN.findall(tensor)
        if len(fans) > 1:
            raise ValueError(f"the public name '{one.tensor}' of '{name}' has more than one index in braces")
        link = Link(Part(name, one.ours), Part(tensor, one.theirs), fans[0] if fans else None)
        if link.ours.shape != placement.shape:
            raise ValueError(f"a map of '{name}' describes the shape {link.ours.shape}, but it has {placement.shape}")
        yield link


def _substituted(public: str, texts: tuple[str, ...], name: str) -> str:
    """A public name with the texts that the stars of our pattern match."""
    if public.count("*") > len(texts):
        raise ValueError(f"the public name '{public}' of '{name}' has more stars than our pattern")
    return substituted(public, texts)


def _maps(name: str, placement: Placement, external: External) -> Iterable[ExternalMap]:
    if external is None:
        return ()
    if isinstance(external, tuple):
        return external
    if isinstance(external, str | Transposed):
        return (_map(external, placement.shape, None),)
    fused = [(dim, segments) for dim, segments in enumerate(placement.dims) if len(segments) > 1]
    if len(fused) != 1:
        raise ValueError(
            f"the external name of '{name}' fuses or interleaves segments, so the plan must give several segments to "
            f"exactly one of its dimensions, not to {len(fused)}"
        )
    ((dim, segments),) = fused
    lengths = [segment.length for segment in segments]
    if isinstance(external, Interleaved):
        if len(set(lengths)) > 1:
            raise ValueError(f"the segments of '{name}' have different lengths, so no tensor can interleave them")
        parts = [Factor(str(dim), sum(lengths), number, lengths[0], len(lengths)) for number in range(len(lengths))]
        sources = (external.source,) * len(lengths)
    else:
        parts = [Factor(str(dim), length) for length in lengths]
        sources = external.sources
    if len(sources) != len(lengths):
        raise ValueError(f"'{name}' has {len(lengths)} segments and {len(sources)} external names")
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    own = [Factor(str(dim), sum(lengths), start, n) for start, n in zip(starts, lengths, strict=True)]
    triples = zip(sources, own, parts, strict=True)
    return [_map(source, placement.shape, (dim, ours, theirs)) for source, ours, theirs in triples]


def _map(source: Source, shape: tuple[int, ...], fused: tuple[int, Factor, Factor] | None) -> ExternalMap:
    """The map of one public tensor; `fused` is (dimension, our factor, theirs) if it holds one segment of ours."""
    ours = [(Factor(str(dim), size),) for dim, size in enumerate(shape)]
    theirs = list(ours)
    if fused is not None:
        dim, own, part = fused
        ours[dim], theirs[dim] = (own,), (part,)
    tensor = source.tensor if isinstance(source, Transposed) else source
    if "{}" in tensor:
        tensor, theirs = tensor.replace("{}", "{0}"), theirs[1:]
    if isinstance(source, Transposed):
        theirs[-2:] = reversed(theirs[-2:])
    return ExternalMap(tuple(ours), tensor, tuple(theirs))


def _refuse_gaps(name: str, numel: int, links: tuple[Link, ...]) -> None:
    covered = sum(link.ours.numel for link in links)
    if covered != numel:
        raise ValueError(f"the external names of '{name}' describe {covered} elements, but it has {numel}")
    if len(links) > 1 and _overlap(tuple(link.ours.dims for link in links)):
        raise ValueError(f"the external names of '{name}' describe some of its elements twice, and others not at all")


def _refuse_uncovered(conversion: Conversion) -> None:
    """Raise ValueError if links give a public tensor two shapes, or do not describe each of its elements once."""
    for tensor, targets in conversion.public.items():
        first = targets[0].link
        for target in targets:
            if target.link.theirs.shape != first.theirs.shape:
                raise ValueError(
                    f"'{first.ours.tensor}' and '{target.link.ours.tensor}' give the public tensor '{tensor}' the "
                    f"shapes {first.theirs.shape} and {target.link.theirs.shape}"
                )
        covered, numel = sum(target.link.theirs.numel for target in targets), _numel(first.theirs.dims)
        owners = listed(dict.fromkeys(target.link.ours.tensor for target in targets))
        if covered != numel:
            raise ValueError(f"{owners} describe {covered} elements of '{tensor}', which has {numel}")
        if len(targets) > 1 and _overlap(tuple(target.link.theirs.dims for target in targets)):
            raise ValueError(f"{owners} describe some elements of '{tensor}' twice, and others not at all")


def _numel(dims: Dims) -> int:
    total = 1
    for dim in dims:
        for factor in dim:
            total *= factor.size
    return total


@cache  # equal blocks have equal regions
def _overlap(regions: tuple[Dims, ...]) -> bool:
    """Whether two regions of a tensor have an element in common: their indices then meet along every dimension."""
    return any(
        all(not _indices(a).isdisjoint(_indices(b)) for a, b in zip(one, other, strict=True))
        for one, other in combinations(regions, 2)
    )


@cache
def _indices(dim: tuple[Factor, ...]) -> frozenset[int]:
    """The selected indices of a dimension: the row-major indices of the selected indices of its factors."""
    found = [0]
    for factor in dim:
        own = range(factor.start, factor.start + factor.length * factor.step, factor.step)
        found = [outer * factor.size + inner for outer, inner in product(found, own)]
    return frozenset(found)
