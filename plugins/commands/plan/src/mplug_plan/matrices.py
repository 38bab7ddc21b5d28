"""Seconds in which an optimizer of whole matrices multiplies them: Muon orthogonalises each (arXiv 2502.16982)."""

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mplug import Model, Placement, Run
    from mplug_plan.machine import Machine

OF_MATRICES = {"optimizers/muon": "num_iterations"}
"""Optimizers, and the field with their number of iterations."""
TABLES = frozenset({"vocab", "positions", "token_types", "ranges", "conv"})
"""Axes of look-up tables, whose rows are separate vectors."""


def orthogonalising(run: "Run", model: "Model", machine: "Machine") -> float:
    """The seconds of a rank, if ranks share the matrices equally. 0 for an optimizer of elements."""
    names = [name for name in OF_MATRICES if name in run.hooks.implementers("build_optimizer")]
    if not names:
        return 0.0
    iterations = int(getattr(run.config.optimizer, OF_MATRICES[names[0]]))
    sharding = model.sharding
    of_shards = {name: bucket for bucket in (sharding.buckets if sharding else ()) for name in bucket.names}
    own = tuple(f"{unit.name}." for unit in model.own_units)
    found = 0.0
    for name, placement in model.placements.items():
        if not name.startswith(own) or not placement.parameter.trainable or len(placement.shape) < 2:
            continue
        if TABLES.isdisjoint(placement.parameter.axes):
            ranks = placement.numel / max(prod(placement.local_shape(run.rank)), 1)
            if name in of_shards:
                ranks *= of_shards[name].num_owners
            found += iterations * _iteration(placement, machine) / ranks
    return found


def _iteration(placement: "Placement", machine: "Machine") -> float:
    """Seconds of an iteration over all matrices of a parameter: X Xᵀ [K, K], its square, and their product with X."""
    columns, batch = placement.shape[-1], prod(placement.shape[:-2])
    found = 0.0
    for segment in placement.dims[-2]:  # queries, keys and values are matrices of their own
        small, large = sorted((segment.length, columns))
        found += 2 * machine.product(small, small, large) + machine.product(small, small, small)
    return batch * found
