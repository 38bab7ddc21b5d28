"""Finish gradients by placement: one pass of the host, in a fixed order.

The host sums every gradient over the mesh axes over which it is partial (`Placement.partial_axes`). It omits the axes
in `sinks.reduced_over`: a listening strategy (data parallelism) has summed over those. Examples of what remains: norms
under sequence parallelism, QK-norms, KV heads that several ranks hold, tied embeddings on two stages.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mplug.contracts.optimizer import Piece
from mplug.gradients.region import region
from mplug.gradients.wide import wide
from mplug.layout.placement import Placement
from mplug.layout.ranks import Ranks
from mplug.run.run import Run
from mplug.training.steps import NoReduction
from mplug_ops import Exchange, Item, in_order

IN_PLACE = 1 << 18
"""A gradient of at least this many elements is reduced on its own, because a flat copy would double its memory."""


class Reduction(NoReduction):
    """Sums gradients over groups of ranks: large ones in place, the small ones of a group as one flat tensor.

    The gradients of a group have the order of `placements`, on every rank: two pipeline stages may hold the parameters
    that they share in different orders. `sums` are the groups with the gradients of this rank.
    """

    def __init__(
        self, run: Run, placements: Mapping[str, Placement], reduced_over: Collection[str], pieces: list[Piece]
    ) -> None:
        super().__init__()
        self.run = run
        if run.groups is None:
            return
        trained = [placement for placement in placements.values() if placement.parameter.trainable]
        # Blocks are alike: their placements differ in the name only.
        different = {(one.parameter, one.shape, one.stages, one.apart, one.partial_axes): one for one in trained}
        left = [part.partial for one in different.values() for part in one.after_summing(reduced_over).regions]
        views = defaultdict[Ranks, dict[Item, Tensor]](dict)
        for piece in pieces:
            placement = piece.placement.after_summing(reduced_over)
            _refuse_apart_and_partial(placement)
            for box in placement.boxes(run.rank):
                views[box.partial][Item(piece.name, box.shape, box.start)] = region(piece.gradient, box)
        different_groups = {grouping.leader: grouping for grouping in left if grouping.size > 1}
        for grouping in different_groups.values():  # in the order of the plan, on every rank
            group, own = run.groups.of(grouping), grouping.of(run.rank)
            if len(own) > 1 and own in views:
                held = views.pop(own)
                items = in_order(held, placements)
                self.sums.append((Exchange("gradients by placement", group, items), [held[one] for one in items]))
        for ranks in views:
            if len(ranks) > 1:
                raise ValueError(
                    f"a piece has a gradient that is partial over {len(ranks)} ranks from rank {ranks.first} on, and "
                    f"no placement of the model states it: the placements of a strategy contradict its pieces"
                )

    def finish(self) -> None:
        """Sum the gradients that are still partial, and wait for the sums."""
        for exchange, views in self.sums:
            exchange.check()
            group = exchange.group
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


def _refuse_apart_and_partial(placement: Placement) -> None:
    """Raise ValueError if gradients must still be summed over an axis along which ranks keep different parts.

    The host cannot sum them: each rank has the gradients of its own part only.
    """
    for axis in placement.partial_axes:
        if axis in placement.apart and placement.mesh.axes[axis].size > 1:
            raise ValueError(
                f"ranks along axis '{axis}' own different parts of '{placement.name}', and nothing sums its gradient "
                f"over this axis: the strategy that divides it must sum it and add '{axis}' to sinks.reduced_over"
            )
