"""A model's description, put together from what its building blocks contribute: most of a plan."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from mplug.layout.names import compiled
from mplug.layout.plan import Buffer, Parameter
from mplug.layout.work import Flops
from mplug.model.work import flops_of_work, work_of
from mplug_nn.inits import Inits

Entry = TypeVar("Entry")
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A component of a dotted name that is a number."""


@dataclass(frozen=True)
class Description:
    """Fields of `mplug.Plan` with the same names, for all parameters of a module."""

    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Buffer]
    tied: tuple[tuple[str, ...], ...]
    flops: Flops


def describe(module: nn.Module, inits: Inits) -> Description:
    """Describe a module on the meta device from the contributions of its blocks.

    A block contributes by a method `plan_entries(inits)`, which returns `mplug_nn.Entries`. If a block and an inner
    module describe the same parameter, the outer block decides. So a block of your own overrides what `mplug_nn` says.

    Raises ValueError if no block describes a parameter, or if a block describes something that it does not have.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    aliases = {alias for group in names.values() for alias in group}
    found = _entries(module, inits, {*aliases, *(name for name, _ in module.named_buffers())})
    parameters: dict[str, Parameter] = {}
    for name in (group[0] for group in names.values()):
        entry = found.get(name)
        if not isinstance(entry, Parameter):
            owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise ValueError(
                f"no building block describes the parameter '{name}'; give {owner}, or a block around it, a method "
                f"'plan_entries' that returns a Parameter for it"
            )
        parameters[name] = entry
    return Description(
        parameters=_patterns(parameters),
        buffers=_patterns({name: entry for name, entry in found.items() if isinstance(entry, Buffer)}),
        tied=tuple(tuple(group) for group in names.values() if len(group) > 1),
        flops=flops_of(module),
    )


def describe_added(modules: Mapping[str, nn.Module], inits: Inits) -> Description:
    """Describe modules that are added to a model, by their names in the model.

    Raises ValueError if a module does not describe one of its parameters.
    """
    parts = {name: describe(module, inits) for name, module in modules.items()}
    parameters = dict[str, Parameter]()
    buffers = dict[str, Buffer]()
    for name, module in modules.items():
        own = [f"{name}.{one}" for one, _ in module.named_parameters()]
        parameters |= _by_name(name, parts[name].parameters, own)
        buffers |= _by_name(name, parts[name].buffers, [f"{name}.{one}" for one, _ in module.named_buffers()])
    per_token = sum(part.flops.per_token for part in parts.values())
    return Description(_patterns(parameters), _patterns(buffers), (), Flops(per_token, 0))


def _by_name(prefix: str, entries: Mapping[str, Entry], names: Iterable[str]) -> dict[str, Entry]:
    regexes = {compiled(f"{prefix}.{pattern}"): entry for pattern, entry in entries.items()}
    return {name: entry for name in names for regex, entry in regexes.items() if regex.fullmatch(name)}


def flops_of(module: nn.Module) -> Flops:
    """The sum of what the parts of a module state: 6 FLOPs a weight and token, and those of products of activations."""
    return flops_of_work(work_of(module))


def _entries(module: nn.Module, inits: Inits, names: set[str]) -> dict[str, Parameter | Buffer]:
    """What each block says of its parameters and buffers; the outermost block decides."""
    found: dict[str, Parameter | Buffer] = {}
    for prefix, part in module.named_modules():  # from the outside to the inside
        if not hasattr(part, "plan_entries"):
            continue
        for own, entry in part.plan_entries(inits).items():
            name = f"{prefix}.{own}" if prefix else own
            if name not in names:
                raise ValueError(
                    f"{type(part).__name__}.plan_entries describes '{own}', but the module has no parameter or buffer "
                    f"'{name}'"
                )
            found.setdefault(name, entry)
    return found


def _patterns(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Names that differ only in numbers become one pattern if all of them have the same entry."""
    alike: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        alike.setdefault(NUMBER.sub("*", name), {})[name] = entry
    found: dict[str, Entry] = {}
    for pattern, group in alike.items():
        first = next(iter(group.values()))
        if all(entry == first for entry in group.values()) and not _covers(pattern, alike):
            found[pattern] = first
        else:
            found |= group
    return found


def _covers(pattern: str, others: Iterable[str]) -> bool:
    """Whether a pattern matches names of another group too, as 'blocks.*.weight' matches 'blocks.last.weight'."""
    parts = pattern.split(".")
    split = (other.split(".") for other in others if other != pattern)
    return any(
        len(other) == len(parts) and all(mine in ("*", theirs) for mine, theirs in zip(parts, other, strict=True))
        for other in split
    )
