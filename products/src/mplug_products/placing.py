"""Adds the buffers that the selected offers declare to the model: to its modules, its plan and its placements.

Placements of parameters come first, because strategies select by them ("is this weight split?"). Then the host selects
offers, and places their buffers. No memory exists before that.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from mplug.errors import UsageError, listed, suggest
from mplug.gradients.wide import wide
from mplug.layout.mesh import Axis
from mplug.layout.names import role_of
from mplug.layout.placement import Placement
from mplug.layout.plan import Buffer, Init, Parameter, axes_of
from mplug.model.model import Model
from mplug.model.slots.offers import RECOMPUTING, Filled
from mplug.model.slots.slot_buffer import SlotBuffer
from mplug.run.run import Run
from mplug_products.slot_buffers import hold
from mplug_products.states import HeldBuffers


def add_slot_buffers(model: Model, run: Run, contents: Iterable[Filled]) -> None:
    """Register, describe and place the buffers of all sites; UsageError if an offer declares impossible ones."""
    dtype, axes = wide(run.precision.weight_dtype), model.plan.named_axes
    described: dict[str, Buffer] = {}
    for filled in contents:
        declared = _declared(filled)
        if not declared or filled.offer is None:
            continue
        site, plugin = filled.site, filled.offer.plugin
        _refuse_wraps_without_buffers(filled)
        _refuse_unknown_axes(filled, declared, axes)
        try:
            tensors = {name: torch.empty(one.shape, dtype=dtype, device="meta") for name, one in declared.items()}
            hold(site.module, site.declared, tensors)
        except ValueError as error:
            raise UsageError(
                f"{plugin} declares buffers for {site.slot} of '{site.role}' (Offer.buffers): {error}; use another "
                f"kernel for this slot"
            ) from None
        own = HeldBuffers(site, filled.offer, declared)
        model.slot_buffers.append(own)
        for name, one in declared.items():
            described[own.full_name(name)] = one.described
            model.buffer_placements[own.full_name(name)] = _placed(model, run, own, name)
    model.plan = replace(model.plan, buffers={**model.plan.buffers, **_patterns(described)})


def _declared(filled: Filled) -> Mapping[str, SlotBuffer]:
    if filled.offer is None:
        return {}
    declared = filled.offer.buffers(filled.site)
    for name, one in declared.items():
        if not isinstance(one, SlotBuffer):
            raise UsageError(
                f"{filled.offer.plugin}: Offer.buffers gives '{name}' of {filled.site.slot} as "
                f"{type(one).__name__}; it must be a mplug.SlotBuffer"
            )
    return declared


def _refuse_wraps_without_buffers(filled: Filled) -> None:
    for wrap in filled.wraps:
        if wrap.layer < RECOMPUTING and not wrap.passes_buffers:
            raise UsageError(
                f"{filled.supplier} keeps buffers for {filled.site.slot} of '{filled.site.role}', and {wrap.plugin} "
                f"wraps this slot without declaring that it passes them on (Wrap.passes_buffers); use another kernel "
                f"for this slot, or a layout without {wrap.plugin.rpartition('/')[2]}"
            )


def _refuse_unknown_axes(filled: Filled, declared: Mapping[str, SlotBuffer], axes: frozenset[str]) -> None:
    for name, one in declared.items():
        for named in sorted(set(one.over) - axes):
            raise UsageError(
                f"{filled.supplier} declares that buffer '{name}' of {filled.site.slot} is over '{named}', and no "
                f"parameter, entry or activation of the model has this axis{suggest(named, axes)}; over which axes a "
                f"statistic is reduced must be known (Offer.buffers)"
            )


def _placed(model: Model, run: Run, own: HeldBuffers, name: str) -> Placement:
    """The placement of a buffer, whose partial axes are those over which its values are reduced.

    An axis may split a weight of the module, and also the activations around it (sequence parallelism). An operand is
    whole along these activations if the collectives around the product gather or scatter it. The axes belong to the
    view of the mesh in which the weights are split: a module of another view has the rows of the ranks of that view.
    """
    one, weights = own.declared[name], own.site.parameters.values()
    described = Parameter(one.dims, Init("constant", value=one.value), one.over)
    placement = model.placed(own.full_name(name), described, one.shape, run.mesh)
    splitting = {
        axis.name for axis in run.mesh.axes.values() for part in weights if part.axes.intersection(axis.splits)
    }
    return replace(placement, beside=tuple(sorted(splitting))).after_summing(
        axis
        for axis in sorted(splitting)
        if not any(named in run.mesh.axes[axis].splits or named in run.mesh.axes[axis].entries for named in one.over)
        and not _sees_a_part(own, name, run.mesh.axes[axis])
    )


def _sees_a_part(own: HeldBuffers, name: str, axis: Axis) -> bool:
    """Whether the ranks of an axis that splits the site's weight have parts of the operand of a statistic.

    A supplier that does the work of the collectives sees operands as they come, outside of them: if the weight's
    outputs are split, parts of the input, and if its inputs are split, parts of the output's gradient.
    """
    one, weight = own.declared[name], own.site.parameters.get("weight")
    if not own.site.declared.collectives or weight is None or not set(one.over).intersection(axis.activations):
        return False
    outputs, inputs = (axes_of([dim]) for dim in weight.dims)
    operand = axes_of(one.dims) | set(one.over)
    if bool(outputs & operand) == bool(inputs & operand):
        raise UsageError(
            f"{own.offer.plugin} declares that buffer '{name}' of {own.site.slot} is over {listed(one.over)}: the "
            f"operand is unknown; name the axes of the weight's inputs ({listed(sorted(inputs))}) in over or dims for "
            f"the input, or those of its outputs ({listed(sorted(outputs))}) for the output's gradient"
        )
    split = outputs if outputs.intersection(axis.splits) else inputs
    return not split & operand


def _patterns(described: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """One pattern per role, or one per buffer if the sites of a role have different ones."""
    roles: dict[str, dict[str, Buffer]] = {}
    for name, one in described.items():
        roles.setdefault(role_of(name), {})[name] = one
    found: dict[str, Buffer] = {}
    for role, buffers in roles.items():
        first, *others = buffers.values()
        found |= {role: first} if all(other == first for other in others) else buffers
    return found
