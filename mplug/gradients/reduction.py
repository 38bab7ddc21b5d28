"""Finish gradients by placement: one pass of the host, in a fixed order.

For every gradient, the host sums over the axes over which its placement says that it is partial, except the axes in
`sinks.reduced_over`: a listening strategy (data parallelism) has summed over those. Examples of what remains: norms
under sequence parallelism, QK-norms, KV heads that several ranks hold, tied embeddings on two stages.
"""

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mplug.contracts import Piece
from mplug.gradients.precision import wide
from mplug.gradients.region import region
from mplug.layout.placement import Box, Placement
from mplug.run.run import Run

IN_PLACE = 1 << 18
"""Number of elements from which a gradient is reduced on its own: a flat copy of large ones doubles their memory."""


class Reduction:
    """Sums gradients over groups of ranks: large ones in place, the small ones of a group as one flat tensor."""

    def __init__(
        self, run: Run, placements: Mapping[str, Placement], reduced_over: Collection[str], pieces: list[Piece]
    ) -> None:
        self.run, self.done = run, reduced_over
        self.sums: list[tuple[dist.ProcessGroup | None, list[Tensor]]] = []
        if run.groups is None:
            return
        trained = [placement for placement in placements.values() if placement.parameter.trainable]
        different = {(p.parameter, p.shape, p.holders): p for p in trained}  # blocks are alike
        families = {
            self._left(placement, box, rank)
            for placement in different.values()
            for rank in placement.holders
            for box in placement.boxes(rank)
        }
        wanted = sorted(ranks for ranks in families if len(ranks) > 1)
        run.groups.of(wanted)  # a collective: all ranks make all groups
        for ranks in wanted:
            views = [
                region(piece.gradient, box)
                for piece in pieces
                for box in piece.placement.boxes(run.rank)
                if self._left(piece.placement, box, run.rank) == ranks
            ]
            if views:
                self.sums.append((run.groups.of([ranks]), views))

    def _left(self, placement: Placement, box: Box, rank: int) -> tuple[int, ...]:
        """The ranks over which a box's gradient is still partial after the sums of listeners.

        Only the axes in `placement.partial_axes` count: a listener along an axis of another view has not summed it.
        """
        mesh, done = self.run.mesh, [axis for axis in self.done if axis in placement.partial_axes]
        own = [mesh.index(rank, axis) for axis in done]
        return tuple(other for other in box.partial if [mesh.index(other, axis) for axis in done] == own)

    def finish(self) -> None:
        """Sum the gradients that are still partial, and wait for the sums."""
        for group, views in self.sums:
            alone = [view for view in views if self._goes_in_place(view)]
            under_way = [dist.all_reduce(view, group=group, async_op=True) for view in alone]
            others = [view for view in views if not self._goes_in_place(view)]
            if others:
                self._sum_as_one(others, group)
            for work in under_way:
                work.wait()

    def _goes_in_place(self, view: Tensor) -> bool:
        suits = view.is_contiguous() and view.dtype == wide(view.dtype) and view.device.type == self.run.device
        return view.numel() >= IN_PLACE and suits

    def _sum_as_one(self, views: list[Tensor], group: dist.ProcessGroup | None) -> None:
        """Sum on the run's device; offloaded gradients are on another one."""
        flat = torch.cat([view.flatten() for view in views])
        flat = flat.to(self.run.device, wide(flat.dtype))
        dist.all_reduce(flat, group=group)
        for view, total in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.copy_(total.view_as(view))
