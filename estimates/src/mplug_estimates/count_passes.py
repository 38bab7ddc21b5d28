"""The passes of a step if a part of the model is frozen: forward runs everything, backward only what training needs.

Backward computes the gradient of a product's input if the input depends on something trained, and the gradient of its
weight if the weight is trained. Products of activations have one backward pass. The plan says what the FLOPs belong to
(`Plan.work`). FLOPs that it states for nothing in particular count as if all their passes were computed.
"""

from typing import TYPE_CHECKING

from mplug.layout.gradient_flow import carrying
from mplug.layout.names import modules_around
from mplug.layout.work import Flops, Work
from mplug.model.plans.work import flops_of_work
from mplug_estimates.passes import Passes

if TYPE_CHECKING:
    from mplug.model.model import Model


def passes_of(model: "Model") -> dict[str, Passes]:
    """The passes of a whole model, by the entry with the lengths of the segments that they work in.

    The entry of the units of tokens is ''. Call it after `Model.place` and before `Model.keep_stage`.
    """
    lengths = {unit.name: model.plan.lengths_of(unit) for unit in model.plan.units}
    entries = ["", *(name for stream in model.plan.streams.values() for name in stream.lengths)]
    by_lengths = {one: [work for work in model.work if lengths[work.unit] == one] for one in entries}
    stated = {one: flops_of_work(work) for one, work in by_lengths.items()} | {"": model.plan.flops}
    return {one: _passes(model, work, stated[one]) for one, work in by_lengths.items()}


def _passes(model: "Model", parts: list[Work], stated: Flops) -> Passes:
    """The passes of these parts of a model's work, and of the FLOPs that the plan states for nothing in particular."""
    with_input, trained = _with_input_gradient(model), _trained(model)
    products = [work for work in parts if work.is_weight]
    cores = [work for work in parts if not work.is_weight]
    no_dgrad = [work for work in products if work not in with_input]
    no_wgrad = [work for work in products if work.name not in trained]
    no_backward = [core for core in cores if core not in with_input]
    found = flops_of_work(parts)
    third, pairs = stated.per_token // 3, stated.of_pairs.times(1, 3)
    of_cores, unused = flops_of_work(cores), flops_of_work(no_backward)
    backward = stated.of_pairs.without(pairs)
    if unused.per_squared_length:
        skipped_pairs = backward.per_squared_length * unused.per_squared_length // found.per_squared_length
        backward = backward.without(Flops(0, skipped_pairs))
    backward = backward.without(Flops(0, 0, unused.windows).times(2, 3))
    moved = of_cores.per_token // 3  # cores have no weights: both thirds of backward are gradients of activations
    skipped = flops_of_work(no_dgrad).per_token // 3 + 2 * unused.per_token // 3
    return Passes(
        Flops.sum((Flops(third, 0), pairs)),
        Flops.sum((Flops(third + moved - skipped, 0), backward)),
        Flops(stated.per_token - 2 * third - moved - flops_of_work(no_wgrad).per_token // 3, 0),
        _names(no_dgrad),
        _names(no_wgrad),
        _names(no_backward),
        Flops(max(stated.per_token - found.per_token, 0), 0 if found.meets_pairs else stated.per_squared_length),
    )


def _names(skipped: list[Work]) -> frozenset[str]:
    return frozenset(work.name for work in skipped)


def _with_input_gradient(model: "Model") -> set[Work]:
    """The work whose input depends on a trained parameter.

    A plan counts all three passes of every product, including the first. So without frozen parameters, the result is
    exactly what the plan states.
    """
    if all(placement.parameter.trainable for placement in model.placements.values()):
        return set(model.work)
    units, trained = model.plan.units, _trained(model)
    carried = dict(zip((unit.name for unit in units), carrying(units, model.trained_units()), strict=False))
    learning = {unit.name for unit in units if not carried[unit.name].isdisjoint(unit.inputs)}
    return {work for work in model.work if work.unit in learning or not trained.isdisjoint(work.after)}


def _trained(model: "Model") -> frozenset[str]:
    """All names of the trained parameters, and the modules that contain them."""
    parameters = [
        alias
        for name, placement in model.placements.items()
        if placement.parameter.trainable
        for alias in model.plan.names_of(name)
    ]
    return frozenset((*parameters, *(module for name in parameters for module in modules_around(name))))
