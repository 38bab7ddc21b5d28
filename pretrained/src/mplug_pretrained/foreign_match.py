"""Which tensors of a foreign checkpoint hold the parameters of a model, by the plan's own or external names."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from mplug.errors import PluginError, RunError, UsageError, some_names
from mplug.layout.placement import Placement
from mplug.model.model import Model
from mplug_pretrained.external import Factor, Link, Part
from mplug_pretrained.external_form import conversion
from mplug_pretrained.foreign import WEIGHT, ForeignCheckpoint, Shape
from mplug_pretrained.transfer import Read
from mplug_pretrained.wanted import Wanted


@dataclass(frozen=True)
class Match:
    """The links of every parameter and state of a model to the tensors of a foreign checkpoint.

    `names` maps the names of tensors in links to those in the checkpoint, where they differ. `unneeded` are tensors
    that the model may leave unread. `dims` is the dimension in which a tensor is cut into parts; None if all parts are
    copies.
    """

    checkpoint: ForeignCheckpoint
    links: Mapping[str, Sequence[Link]]
    names: Mapping[str, str] = field(default_factory=dict)
    unneeded: frozenset[str] = frozenset()
    copies: Mapping[str, Sequence[Link]] = field(default_factory=dict)
    """The links of tensors that repeat a parameter. They must be equal to it where the checkpoint has them."""

    def name(self, tensor: str) -> str:
        """The name of a link's tensor in the checkpoint."""
        return self.names.get(tensor, tensor)

    def sources(self, name: str) -> list[str]:
        """The names, in the checkpoint, of the tensors that hold a parameter."""
        links = self.links.get(name, ())
        return list(dict.fromkeys(self.name(link.public(index)) for link in links for index in link.fanned))

    def present_copies(self, name: str) -> list[Link]:
        """The links of tensors in the checkpoint that repeat a parameter."""
        tensors = self.checkpoint.tensors
        return [
            link
            for link in self.copies.get(name, ())
            if all(self.name(link.public(index)) in tensors for index in link.fanned)
        ]

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shapes that the model needs, by the names in the checkpoint."""
        return {
            self.name(link.public(index)): link.theirs.shape
            for links in (*self.copies.values(), *self.links.values())
            for link in links
            for index in link.fanned
        }

    def cut_dim(self, tensor: str) -> int | None:
        """The dimension in which the parts of a tensor are to be concatenated; None if each part is a copy.

        ValueError if the shapes do not fit.
        """
        found, whole = self.checkpoint.tensors[tensor], self.shapes[tensor]
        differing = [dim for dim, size in enumerate(whole) if len(found.shape) <= dim or found.shape[dim] != size]
        if not differing and len(found.shape) == len(whole):
            return None
        is_cut = len(found.shape) == len(whole) and len(differing) == 1
        if not is_cut or found.parts == 1 or found.shape[differing[0]] * found.parts != whole[differing[0]]:
            raise ValueError(f"{tuple(found.shape)}{f' in each of {found.parts} parts' if found.parts > 1 else ''}")
        return differing[0]

    def reader(self, state: str = WEIGHT) -> Read:
        """Reads boxes of the tensors, or of one of their states, by the names in links."""

        def read(tensor: str, start: Shape, shape: Shape) -> Tensor:
            name = self.name(tensor)
            dim = self.cut_dim(name)
            if dim is None:
                return self._read(name, start, shape, state, 0)
            size, found = self.checkpoint.tensors[name].shape[dim], list[Tensor]()
            for part in range(start[dim] // size, -(-(start[dim] + shape[dim]) // size)):
                low, high = max(start[dim], part * size), min(start[dim] + shape[dim], (part + 1) * size)
                own_start = (*start[:dim], low - part * size, *start[dim + 1 :])
                own_shape = (*shape[:dim], high - low, *shape[dim + 1 :])
                found.append(self._read(name, own_start, own_shape, state, part))
            return torch.cat(found, dim)

        return read

    def _read(self, name: str, start: Shape, shape: Shape, state: str, part: int) -> Tensor:
        owner = type(self.checkpoint).__name__
        try:
            values: object = self.checkpoint.read(name, start, shape, state, part)
        except (UsageError, RunError):
            raise
        except OSError as error:
            raise RunError(f"cannot read '{name}' from '{self.checkpoint.path}': {error.strerror or error}") from error
        except Exception as error:
            raise PluginError(
                f"{owner}.read failed on '{name}' ({state}) of '{self.checkpoint.path}' with {type(error).__name__}: "
                f"{error}; report it to the authors of the form"
            ) from error
        if not isinstance(values, Tensor) or tuple(values.shape) != tuple(shape) or not values.is_floating_point():
            kind = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise PluginError(
                f"{owner}.read returned {kind} for a box of shape {tuple(shape)} of '{name}' "
                f"({state}); it must return floating-point numbers of this shape"
            )
        return values


def needed_of(model: Model) -> dict[str, Placement]:
    """The parameters and states that a checkpoint of the model has."""
    states = {name: one for name, one in model.buffer_placements.items() if not one.parameter.over}
    return model.placements | states


def match(model: Model, checkpoint: ForeignCheckpoint) -> Match:
    """The tensors of every parameter and state of a model.

    Raises UsageError unless the checkpoint has exactly these: with their shapes, and with no other tensor.
    """
    found = best_match(model, checkpoint)
    refuse_mismatch(
        found, needed_of(model), f"'{checkpoint.path}'", "set the section 'model' to that of the checkpoint"
    )
    return found


def best_match(model: Model, checkpoint: ForeignCheckpoint) -> Match:
    """The tensors of as many parameters and states of a model as possible, by the names that the checkpoint uses."""
    needed = needed_of(model)
    links = checkpoint.links(model)
    if links is not None:
        candidates = [Match(checkpoint, links)]
    else:
        candidates = [_by_own_names(model, checkpoint, needed), *_by_public_names(model, checkpoint)]
    return min(candidates, key=lambda one: len(_missing(one, needed)))  # the first one of equal ones


def _missing(found: Match, needed: Iterable[str]) -> list[str]:
    """The parameters of which the checkpoint lacks a tensor."""
    present = found.checkpoint.tensors
    return [name for name in needed if not found.sources(name) or not present.keys() >= set(found.sources(name))]


def _by_own_names(model: Model, checkpoint: ForeignCheckpoint, needed: Mapping[str, Placement]) -> Match:
    """The tensors have the names of the model's own parameters; a tied parameter may have any of its names."""
    aliases = {alias: group for group in model.plan.tied for alias in group}
    links, names, unneeded = dict[str, list[Link]](), dict[str, str](), set[str]()
    copies: dict[str, list[Link]] = {}
    for name, placement in needed.items():
        dims = tuple((Factor(str(dim), size),) for dim, size in enumerate(placement.shape))
        links[name] = [Link(Part(name, dims), Part(name, dims))]
        group = aliases.get(name, (name,))
        present = [alias for alias in group if alias in checkpoint.tensors]
        names[name] = present[0] if present else name
        unneeded |= set(present[1:])
        copies[name] = [Link(Part(name, dims), Part(alias, dims)) for alias in present[1:]]
    return Match(checkpoint, links, names, frozenset(unneeded), copies)


def _by_public_names(model: Model, checkpoint: ForeignCheckpoint) -> Iterator[Match]:
    """The tensors have the names of the model's published form, or those that some folders have in their place."""
    if model.plan.external is None:
        return
    try:
        made = conversion(model)
    except UsageError:  # these settings of the model have no published form, so no checkpoint has its names
        return
    back = made.names.public_names(checkpoint.tensors.keys(), {*made.public, *made.duplicates})
    names = {public: stored for stored, public in back.items() if public != stored}
    present = set(back.values())
    unneeded = {name for name in checkpoint.tensors if made.ignores(back[name], present)}
    yield Match(checkpoint, made.links, names, frozenset(unneeded), made.copies)


def refuse_mismatch(
    found: Match, needed: Mapping[str, Placement], label: str, remedy: str, wanted: Wanted | None = None
) -> None:
    """Raise UsageError unless each parameter has its tensors, of the right shapes, and each tensor is one's.

    Without `wanted`, all parameters are needed.
    """
    checkpoint, missing = found.checkpoint, _missing(found, needed)
    unused = [
        name
        for name in checkpoint.tensors
        if name not in found.shapes and name not in found.unneeded and not (wanted is not None and wanted.allows(name))
    ]
    problems = [f"it has no counterpart of {some_names(missing)}"] if missing else []
    problems += [f"the model does not use {some_names(unused)}"] if unused else []
    wrong = [
        sentence
        for name, placement in needed.items()
        if name not in missing
        for sentence in [*_wrong_shapes(found, name), *_gaps(found, name, placement)]
    ]
    wrong = wrong or list(_ambiguous_cuts(found, needed)) if not missing else wrong
    if problems or wrong:
        raise UsageError(f"{label} does not fit the model: {'; '.join([*problems, *wrong[:1]])}; {remedy}")


def _wrong_shapes(found: Match, name: str) -> Iterator[str]:
    copies = (found.name(link.public(index)) for link in found.present_copies(name) for index in link.fanned)
    for tensor in (*found.sources(name), *copies):
        try:
            found.cut_dim(tensor)
        except ValueError as error:
            yield f"'{tensor}' has shape {error}, but '{name}' needs {found.shapes[tensor]}"


def _gaps(found: Match, name: str, placement: Placement) -> Iterator[str]:
    """A form with links of its own may describe a parameter in part, or with another shape."""
    covered = sum(link.ours.numel for link in found.links[name])
    if covered != placement.numel or any(link.ours.shape != placement.shape for link in found.links[name]):
        yield f"its links describe {covered} elements of '{name}', which has {placement.numel}"


def _ambiguous_cuts(found: Match, needed: Mapping[str, Placement]) -> Iterator[str]:
    """Parts are concatenated if the cut dimension holds one segment of ours, completely and in order.

    A dimension of several segments (fused queries, keys and values) may be cut segment by segment or as a whole, and
    the checkpoint does not say which.
    """
    for name, placement in needed.items():
        for link in found.links[name]:
            for tensor in {found.name(link.public(index)) for index in link.fanned}:
                dim = found.cut_dim(tensor)
                if dim is not None and not _holds_one_segment(link, placement, dim):
                    yield (
                        f"tensor parallelism has cut '{tensor}' into {found.checkpoint.tensors[tensor].parts} parts "
                        f"along a dimension that holds several segments of '{name}', and the checkpoint does not say "
                        f"how to join them (convert it to a universal checkpoint, which joins them)"
                    )


def _holds_one_segment(link: Link, placement: Placement, dim: int) -> bool:
    """Whether a dimension of a link's tensor is the whole range of one factor that lies in one segment of ours."""
    theirs = link.theirs.dims[dim]
    if len(theirs) != 1 or theirs[0].length != theirs[0].size:
        return False
    for own, segments in zip(link.ours.dims, placement.dims, strict=True):
        factor = next((one for one in own if one.label == theirs[0].label), None)
        if factor is None:
            continue
        if len(own) != 1 or factor.step != 1:
            return False
        low, start = factor.start, 0
        for segment in segments:
            if start <= low and low + factor.length <= start + segment.length:
                return True
            start += segment.length
    return False
