"""Which activations carry a gradient, given the units that are trained."""

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mplug.layout.plan import Unit


def carrying(units: Iterable["Unit"], trained: Container[str]) -> list[frozenset[str]]:
    """The activations that carry a gradient: one set before each unit, and one after the last.

    An activation carries a gradient if the unit that returns it has trained parameters (its name is in `trained`), or
    takes an activation that carries one.
    """
    carried, found = frozenset[str](), list[frozenset[str]]()
    for unit in units:
        found.append(carried)
        learns = unit.name in trained or not carried.isdisjoint(unit.inputs)
        carried = carried.union(unit.outputs) if learns else carried.difference(unit.outputs)
    return [*found, carried]
