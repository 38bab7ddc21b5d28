"""The vectors of all data-parallel ranks, for the contrastive loss. N vectors of a rank, R ranks."""

from typing import TYPE_CHECKING

import mplug_ops as ops

if TYPE_CHECKING:
    from torch import Tensor

    from mplug import Run


class AcrossRanks:
    """Gathers vectors over the ranks that read different samples. Gradients return to the rank of the vector.

    Every rank computes the losses of its own queries. A vector's gradient is the sum of those of all ranks' losses
    (the backward of `mplug_ops.gather`), so that the sums over ranks are those of one process.
    """

    def __init__(self, group: ops.Group) -> None:
        self.group = group

    def __call__(self, vectors: "Tensor", counts: "Tensor") -> tuple["Tensor", "Tensor", int]:
        """[N, D] and [N] -> [R N, D], [R N], and the number of this rank's first row."""
        first = 0 if self.group is None else self.group.rank() * len(vectors)
        return ops.gather(vectors, self.group, 0), ops.all_gather(counts.int(), self.group, 0).bool(), first


def across(run: "Run") -> AcrossRanks:
    """The gathering of a run. Collective."""
    axes = [
        axis.name
        for axis in run.mesh.axes.values()
        if "batch" in axis.entries and axis.size > 1 and not axis.independent
    ]
    return AcrossRanks(run.group(*axes, use="embeddings") if axes else None)
