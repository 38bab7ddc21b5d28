"""The plan of a model that is a part of a larger one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from mplug.layout.plan import Plan

Entry = TypeVar("Entry")


def plan_within(plan: Plan, name: str) -> Plan:
    """The plan of a model whose module is the submodule `name` of a larger one.

    The names of units, parameters and buffers begin with `name`, as do all patterns. Entries, activations, axes and
    public names stay as they are: the plan around it adds its own, and renames public tensors
    (`ExternalNames.renamed`). It also names the parts that have folders of their own (`Plan.parts`).
    """

    def inside(entries: Mapping[str, Entry]) -> dict[str, Entry]:
        return {f"{name}.{one}": entry for one, entry in entries.items()}

    def all_inside(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name}.{one}" for one in names)

    external = plan.external
    if external is not None:
        copies = {public: f"{name}.{ours}" for public, ours in external.copies.items()}
        external = replace(external, tensors=inside(external.tensors), copies=copies)
    return replace(
        plan,
        units=tuple(replace(unit, name=f"{name}.{unit.name}") for unit in plan.units),
        inference=tuple(replace(unit, name=f"{name}.{unit.name}") for unit in plan.inference),
        parameters=inside(plan.parameters),
        buffers=inside(plan.buffers),
        mixing=inside(plan.mixing),
        tied=tuple(map(all_inside, plan.tied)),
        frozen=all_inside(plan.frozen),
        base_modules=all_inside(plan.base_modules),
        external=external,
        parts={},
        work=None,
    )
