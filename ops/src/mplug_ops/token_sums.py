"""Offers of sums over the ranks that divide tokens, which modules use in forward.

Those of `Slot.sums_tokens` are statistics without a gradient; those of `Slot.sums_parts` are terms of a loss.
"""

from itertools import combinations

from torch import Tensor

from mplug.layout.plan import TOKENS_AXIS
from mplug.model.model import Model
from mplug.model.slots.offers import Offer
from mplug.model.slots.token_offers import TOKENS
from mplug.run.run import Run
from mplug_ops.collectives import all_reduce, reduce


def token_sums(run: Run, model: Model) -> list[Offer]:
    """The supplier of such slots: it sums over the mesh axes of the dense view that divide the named axes.

    Independent workers are not summed: they train models of their own.

    Collective: all ranks make the process groups here, including ranks whose stage has no such slot.
    """
    view = [
        axis
        for axis in run.mesh.views["dense"]
        if not axis.independent and any(axis.divides(named) for named in TOKENS)
    ]
    if not model.plan.buffers or not view:
        return []
    wanted = [named for count in (1, 2) for named in combinations(TOKENS, count)]
    groups = {
        frozenset(over): run.group(*(axis.name for axis in view if any(axis.divides(named) for named in over)))
        for over in wanted
    }

    def summed(values: Tensor, over: tuple[str, ...]) -> Tensor:
        return all_reduce(values, groups[frozenset(over)])

    slots = [slot.name for slot in model.declared.values() if slot.sums_tokens]
    return [Offer({slot: summed}, plugin="host") for slot in slots]


def sums_of_parts(run: Run, model: Model) -> list[Offer]:
    """The supplier of such slots: it sums over the mesh axes that divide the sequence in the entries of a batch.

    Axes that divide it only inside of the model (sequence parallelism) have whole sequences at the model's end.
    """
    slots = [slot.name for slot in model.declared.values() if slot.sums_parts]
    axes = [axis.name for axis in run.mesh.views["dense"] if TOKENS_AXIS in axis.entries]
    if not slots or not axes:
        return []
    group, share = run.group(*axes), float(run.mesh.number(run.rank, axes) == 0)

    def summed(values: Tensor) -> tuple[Tensor, float]:
        return reduce(values, group), share

    return [Offer({slot: summed}, plugin="host") for slot in slots]
