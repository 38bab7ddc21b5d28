"""Stages of a pipeline whose blocks differ: what rank 0 builds before launch, so that no other rank refuses the run."""

from collections.abc import Container, Hashable
from typing import TYPE_CHECKING

from mplug.model.model import Model
from mplug.model.slots.fill import sites

if TYPE_CHECKING:
    from mplug.layout.mesh import Mesh


def ranks_of_unlike_stages(model: Model, mesh: "Mesh", entries: Container[str]) -> list[int]:
    """The first rank of every stage with a kind of block that the stages before it lack; rank 0 is not among them.

    `entries` are the optional entries that micro batches have. Call it between `Model.place` and `Model.keep_stage`.
    """
    first = dict[int, int]()
    for rank in range(mesh.world_size):
        first.setdefault(mesh.index(rank, model.stages.axis), rank)
    known, found = set[Hashable](), list[int]()
    for index, rank in first.items():
        kinds = {kind for chunk in model.stages.chunks_of(index) for kind in _kinds(model, chunk, entries)}
        if not kinds <= known and rank:
            found.append(rank)
        known |= kinds
    return found


def _kinds(model: Model, chunk: int, entries: Container[str]) -> set[Hashable]:
    """What plugins may tell the blocks of a chunk apart by: classes, needs of slots, shapes of parameters."""
    found, units = set[Hashable](), set(model.stages.units[chunk])
    for unit in (unit for unit in model.plan.units if unit.name in units):
        part = model.module.get_submodule(unit.name)
        found.add((type(part), unit.method, unit.sequence))
        for site in sites(part, entries):
            shapes = tuple(tuple(one.shape) for one in site.module._parameters.values() if one is not None)
            found.add((type(part), site.role, site.slot, type(site.module), site.needs, shapes))
    return found
