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
from typing import Any, NamedTuple

from mplug.errors import listed, suggest
from mplug.registry.installed import described_on_path


@dataclass(frozen=True)
class OpenList:
    """The names of one list. `noun` is the word for an entry in errors, `group` the group of entry points: 'mplug...'.

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
        return [*self.own, *sorted({claim.name for claim in _added(self.group)} - {*self.own})]

    def check(self, name: str) -> str:
        """Return `name` if the list has it; ValueError, with the nearest name, if it does not."""
        if name not in self.own and name not in self.names():
            names = self.names()
            raise ValueError(f"no {self.noun} is named '{name}'{suggest(name, names)} (known: {listed(names)})")
        return name

    def load(self, name: str) -> Any:
        """The entry of a name. ValueError if the name is unknown, or if two distributions claim it."""
        self.check(name)
        claims = [claim for claim in _added(self.group) if claim.name == name]
        owners = [*([self.owner] if name in self.own else []), *(claim.owner for claim in claims)]
        if len(owners) > 1:
            raise ValueError(
                f"the {self.noun} '{name}' is claimed by {listed(owners)}; uninstall one, or rename its entry point"
            )
        module, _, attribute = (self.own[name] if name in self.own else claims[0].target).partition(":")
        return getattr(import_module(module), attribute)


class _Claim(NamedTuple):
    """An entry that the distribution `owner` adds to a list; `target` is 'module:attribute'."""

    owner: str
    name: str
    target: str


@cache
def _added(group: str) -> tuple[_Claim, ...]:
    """The entries that distributions add to a group; of two copies of one distribution, the first counts."""
    found: dict[tuple[str, str], _Claim] = {}
    for metadata, points in described_on_path():
        for point in (point for point in points if point.group == group):
            found.setdefault((metadata.name, point.name), _Claim(metadata.name, point.name, point.value))
    return tuple(found.values())
