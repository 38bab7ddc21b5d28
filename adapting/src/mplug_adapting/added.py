"""The description of modules that are added to a model."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import nn

from mplug.layout.inits import Inits
from mplug.layout.names import compiled
from mplug.layout.plan import Buffer, Parameter
from mplug.model.plans.description import describe, patterns_of

Entry = TypeVar("Entry")


def describe_added(
    modules: Mapping[str, nn.Module], inits: Inits
) -> tuple[Mapping[str, Parameter], Mapping[str, Buffer]]:
    """The parameters and buffers of modules that are added to a model, by the names of the modules in the model.

    Raises ValueError if a module does not describe one of its parameters.
    """
    parts = {name: describe(module, inits) for name, module in modules.items()}
    parameters = dict[str, Parameter]()
    buffers = dict[str, Buffer]()
    for name, module in modules.items():
        own = [f"{name}.{one}" for one, _ in module.named_parameters()]
        parameters |= _by_name(name, parts[name].parameters, own)
        buffers |= _by_name(name, parts[name].buffers, [f"{name}.{one}" for one, _ in module.named_buffers()])
    return patterns_of(parameters), patterns_of(buffers)


def _by_name(prefix: str, entries: Mapping[str, Entry], names: Iterable[str]) -> dict[str, Entry]:
    regexes = {compiled(f"{prefix}.{pattern}"): entry for pattern, entry in entries.items()}
    return {name: entry for name in names for regex, entry in regexes.items() if regex.fullmatch(name)}
