"""How the ranks of a group lie on nodes."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mplug import Mesh
    from mplug_plan.machine import Machine


class Group(NamedTuple):
    """The ranks of a group, and how many of them are on each node."""

    size: int
    in_a_node: int


def group_of(mesh: "Mesh", axes: Sequence[str], machine: "Machine") -> Group:
    """The group of rank 0 along mesh axes. Nodes hold consecutive ranks."""
    present = [name for name in axes if name in mesh.axes]
    if not present:
        return Group(1, 1)
    size = prod(mesh.axes[name].size for name in present)
    ranks = mesh.group(0, *present)
    near = 0
    for rank in ranks:  # ascending
        if rank >= machine.gpus_per_node:
            break
        near += 1
    return Group(size, max(near, 1))


def is_near(mesh: "Mesh", axis: str, machine: "Machine") -> bool:
    """Whether neighbours along an axis are on one node."""
    return len(mesh.group(0, axis)) < 2 or mesh.group(0, axis)[1] < machine.gpus_per_node
