"""Open lists: names of small functions that a config selects, such as activations. Distributions add their own.

A distribution opens a list by an object of `OpenList`, and states its group by an entry point whose name is the group's
without 'mplug.':

    [project.entry-points."mplug.open_lists"]
    activations = "acme_blocks:ACTIVATIONS"

Any distribution adds an entry to a list by an entry point in the list's group:

    [project.entry-points."mplug.activations"]
    xielu = "acme_xielu:XIELU"

The name is then valid wherever a config names an entry of the list (`model.activation=xielu`). Looking up a name that
the list itself has reads no metadata of distributions. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mplug.errors import listed, suggest


@dataclass(frozen=True)
class OpenList:
    """The names of one list. `noun` is the word for an entry in errors, `group` the group of entry points.

    `own` maps the list's own names to their targets ('module:attribute'), which belong to the distribution `owner`.
    """

    noun: str
    group: str
    own: Mapping[str, str]
    owner: str = "mplug"

    def __hash__(self) -> int:
        return hash(self.group)

    def names(self) -> list[str]:
        """All names: the list's own, then those of other distributions."""
        return [*self.own, *sorted({point.name for point in _added(self.group)} - {*self.own})]

    def check(self, name: str) -> str:
        """Return `name` if the list has it; ValueError, with the nearest name, if it does not."""
        if name not in self.own and name not in self.names():
            names = self.names()
            raise ValueError(f"no {self.noun} is named '{name}'{suggest(name, names)} (known: {listed(names)})")
        return name

    def load(self, name: str) -> Any:
        """The entry of a name. ValueError if the name is unknown, or if two distributions claim it."""
        self.check(name)
        claims = [point for point in _added(self.group) if point.name == name]
        owners = [*([self.owner] if name in self.own else []), *map(_owner, claims)]
        if len(owners) > 1:
            raise ValueError(
                f"the {self.noun} '{name}' is claimed by {listed(owners)}; uninstall one, or rename its entry point"
            )
        module, _, attribute = (self.own[name] if name in self.own else claims[0].value).partition(":")
        return getattr(import_module(module), attribute)


@cache
def _added(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group; two copies of one distribution count once."""
    found = {(_owner(point), point.name): point for point in entry_points(group=group)}
    return tuple(found.values())


def _owner(point: EntryPoint) -> str:
    return str(point.dist.metadata["Name"]) if point.dist is not None else point.value
