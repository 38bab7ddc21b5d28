"""A model's description, put together from what its building blocks contribute: most of a plan."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from mplug.layout.inits import Entries, Inits
from mplug.layout.plan import TOKENS_AXIS, Buffer, Parameter, Plan, Unit
from mplug.layout.work import Flops
from mplug.model.plans.declaring import declarations
from mplug.model.plans.work import flops_of_work, work_of, work_of_units

Entry = TypeVar("Entry")
Axes = Mapping[str, tuple[str, ...]]
"""The named axes of entries or activations, by name."""
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A component of a dotted name that is a number."""


@dataclass(frozen=True)
class Description:
    """Fields of `mplug.Plan` with the same names, for all parameters of a module."""

    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Buffer]
    tied: tuple[tuple[str, ...], ...]
    flops: Flops
    module: nn.Module = field(repr=False)

    def plan(self, *, units: tuple[Unit, ...], context: Axes, activations: Axes, **fields: Any) -> Plan:
        """The plan of a model with this description; `fields` are other fields of `mplug.Plan`.

        The plan's FLOPs are those of its tokens: the work of units of streams does not count.
        """
        streams = flops_of_work(work_of_units(self.module, (unit for unit in units if unit.sequence != TOKENS_AXIS)))
        own: dict[str, Any] = {
            "parameters": self.parameters,
            "buffers": self.buffers,
            "tied": self.tied,
            "flops": self.flops.without(streams),
        }
        return Plan(units, context=context, activations=activations, **(own | fields))


def describe(module: nn.Module, inits: Inits) -> Description:
    """Describe a module on the meta device from the contributions of its blocks.

    A block declares a parameter where it creates it (`mplug.parameter`, `mplug.declare`), or contributes by a method
    `plan_entries(inits)`, which returns `mplug.Entries`. If a block and an inner module describe the same parameter,
    the outer block decides. So a block of your own overrides what a block of another package says of itself.

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
                f"no building block describes the parameter '{name}'; declare it where {owner} creates it "
                f"(mplug.parameter), or give {owner}, or a block around it, a method 'plan_entries' that returns a "
                f"Parameter for it"
            )
        parameters[name] = entry
    return Description(
        parameters=patterns_of(parameters),
        buffers=patterns_of({name: entry for name, entry in found.items() if isinstance(entry, Buffer)}),
        tied=tuple(tuple(group) for group in names.values() if len(group) > 1),
        flops=flops_of(module),
        module=module,
    )


def flops_of(module: nn.Module) -> Flops:
    """The sum of what the parts of a module state: 6 FLOPs a weight and token, and those of products of activations."""
    return flops_of_work(work_of(module))


def _entries(module: nn.Module, inits: Inits, names: set[str]) -> dict[str, Parameter | Buffer]:
    """What each block says of its parameters and buffers; the outermost block decides."""
    found: dict[str, Parameter | Buffer] = {}
    for prefix, part in module.named_modules():  # from the outside to the inside
        of_module, of_tensors = declarations(part, inits)
        stated: Callable[[Inits], Entries] | None = getattr(part, "plan_entries", None)
        for entries in (of_module, {} if stated is None else stated(inits), of_tensors):
            for own, entry in entries.items():
                name = f"{prefix}.{own}" if prefix else own
                if name not in names:
                    raise ValueError(
                        f"{type(part).__name__}.plan_entries describes '{own}', but the module has no parameter or "
                        f"buffer '{name}'"
                    )
                found.setdefault(name, entry)
    return found


def patterns_of(entries: Mapping[str, Entry]) -> dict[str, Entry]:
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
