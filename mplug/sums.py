"""Sums that modules ask for while they run, over whatever divides the tokens: the host's own offer."""

from itertools import combinations

from torch import Tensor

from mplug import ops
from mplug.model import Model
from mplug.run import Run
from mplug.slots import Offer

TOKENS = ("batch", "sequence")
"""The activation axes that tokens lie along."""


def token_sums(run: Run, model: Model) -> list[Offer]:
    """What fills `Router.summed`: sums over the mesh axes of the attention view that divide the named axes.

    Their groups are made here, by all ranks alike: a rank's stage may have no router.
    """
    view = [axis for axis in run.mesh.views["attention"] if any(axis.divides(named) for named in TOKENS)]
    if not model.plan.buffers or not view:
        return []
    wanted = [named for count in (1, 2) for named in combinations(TOKENS, count)]
    groups = {
        frozenset(over): run.group(*(axis.name for axis in view if any(axis.divides(named) for named in over)))
        for over in wanted
    }

    def summed(values: Tensor, over: tuple[str, ...]) -> Tensor:
        return ops.all_reduce(values, groups[frozenset(over)])

    return [Offer({"Router.summed": summed}, plugin="host")]
