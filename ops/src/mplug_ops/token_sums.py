"""Offers of sums over the ranks that divide tokens, which modules use in forward (`Slot.sums_tokens`)."""

from itertools import combinations

from torch import Tensor

from mplug.model.model import Model
from mplug.model.slots.offers import Offer
from mplug.model.slots.token_offers import TOKENS
from mplug.run.run import Run
from mplug_ops.collectives import all_reduce


def token_sums(run: Run, model: Model) -> list[Offer]:
    """The supplier of such slots: it sums over the mesh axes of the dense view that divide the named axes.

    Collective: all ranks make the process groups here, including ranks whose stage has no such slot.
    """
    view = [axis for axis in run.mesh.views["dense"] if any(axis.divides(named) for named in TOKENS)]
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
