"""Balanced streams: ranks that read different samples compute about equally much of a stream (`parallel.balance`).

For each micro batch, the ranks along data axes agree on the lengths of all segments, on the CPU. All of them make the
same table (`Shares`) of who computes what, by the FLOPs of the segments. The rows go to these ranks in one all-to-all
on the device. Their results return in the slot `Slot.returns_rows`, by the entry `mplug.RETURNS` that is made here.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug.contracts.micro_batch import MicroBatch
from mplug.contracts.streams import RETURNS
from mplug.layout.plan import TOKENS_AXIS
from mplug.training.batch_parts import own_entries, rows_by_entry, with_shifted
from mplug_streams.conditions import USE, data_axes
from mplug_streams.rows import lengths_in, lengths_within
from mplug_streams.segment_shares import assigned
from mplug_streams.shares import Shares

if TYPE_CHECKING:
    from mplug.layout.plan import Stream
    from mplug.layout.work import Flops
    from mplug.model.model import Model
    from mplug.run.run import Run

Nested = Mapping[str, Sequence[Sequence[int]]]
"""By the entry with lengths: those within each segment of a micro batch."""


class Balance:
    """Moves the rows of streams between the ranks along data axes. Collective: all ranks must make it."""

    def __init__(self, run: "Run", model: "Model") -> None:
        view, axes = run.mesh.views["dense"], data_axes(run)
        sharing = [axis.name for axis in view if axis.shares_streams and axis.size > 1]
        self.plan, self.mesh, self.rank = model.plan, run.mesh, run.rank
        self.data_rank = run.mesh.number(run.rank, axes)
        self.share = run.mesh.number(run.rank, sharing) if sharing else 0
        self.shares = prod(run.mesh.axes[name].size for name in sharing)
        self.splits = prod(axis.size for axis in view if TOKENS_AXIS in axis.activations)
        self.group, self.cpus = run.group(*axes, use=USE), run.group_of_cpus(*axes, use=USE)
        self.needed = frozenset(name for unit in model.own_units for name in (*unit.inputs, *unit.optional))
        self.flops = {name: passes.flops for name, passes in model.stream_passes.items()}

    def own(self, move: Callable[[MicroBatch], MicroBatch], whole: MicroBatch) -> MicroBatch:
        """This rank's part of a whole micro batch, with the rows that it computes. Collective.

        `move` copies a micro batch to the device.
        """
        batch = with_shifted(whole, self.plan)
        parts = {
            axis: _Moved(self, axis, batch, shares, within) for axis, (shares, within) in self._divided(batch).items()
        }
        of_tokens = {name: x for name, x in batch.items() if not any(name in part.rows for part in parts.values())}
        sent = {name: x for part in parts.values() for name, x in part.sent().items()}
        moved = dict(move({**own_entries({**of_tokens, **sent}, self.plan.context, self.mesh, self.rank)}))
        returns = {axis: part.way(moved) for axis, part in parts.items()}
        for part in parts.values():
            moved |= part.received(moved)
        return {**moved, RETURNS: returns}  # type: ignore[dict-item]  # no unit but a join takes it

    def _divided(self, batch: MicroBatch) -> dict[str, tuple[Shares, list[Nested]]]:
        """By the axis of each stream: who computes what, and the lengths in the micro batches of all data ranks."""
        streams = {axis: one for axis, one in self.plan.streams.items() if rows_by_entry(batch, self.plan, axis)}
        own = {
            axis: {name: lengths_in(batch, name) for name in one.lengths if name in batch}
            for axis, one in streams.items()
        }
        assert self.group is not None, "data ranks have a process group in training"
        found: list[Any] = [None] * self.group.size()
        dist.all_gather_object(found, own, group=self.cpus)
        return {axis: self._shares(one, [of_rank[axis] for of_rank in found]) for axis, one in streams.items()}

    def _shares(self, stream: "Stream", lengths: Sequence[Mapping[str, list[int]]]) -> tuple[Shares, list[Nested]]:
        outer = [one[stream.lengths[0]] for one in lengths]
        within: list[Nested] = [
            {name: lengths_within(of_rank, inner) for name, inner in one.items()}
            for of_rank, one in zip(outer, lengths, strict=True)
        ]
        bins = assigned([_work(one, self.flops) for one in within], self.shares)
        return Shares(outer, bins, self.shares, stream.group, self.splits), within


def _work(within: Nested, flops: "Mapping[str, Flops]") -> list[int]:
    """The FLOPs of each segment; its rows, if the plan states no FLOPs of the stream."""
    segments = [dict(zip(within, parts, strict=True)) for parts in zip(*within.values(), strict=True)]
    found = [
        sum(flops[name].of(sum(parts), sum(one * one for one in parts)) for name, parts in segment.items())
        for segment in segments
    ]
    return found if all(found) else [sum(next(iter(segment.values()))) for segment in segments]


class _Moved:
    """The rows of one stream that this rank sends and receives, and their way back.

    The rows travel to the device as spans, which are views of the loader's tensors: the device puts them in order. (A
    CPU needs 100 ms to order the pixels of 8,192 tokens.) `rows` has the entries with rows, by name: a whole micro
    batch's tensor, and the dimension of the rows.
    """

    def __init__(
        self, balance: Balance, axis: str, batch: MicroBatch, shares: Shares, within: Sequence[Nested]
    ) -> None:
        plan = balance.plan
        self.axis, self.batch, self.shares, self.within = axis, batch, shares, within
        self.rows = {name: (batch[name], plan.context[name].index(axis)) for name in rows_by_entry(batch, plan, axis)}
        self.needed = balance.needed
        self.data_rank, self.group, self.stream = balance.data_rank, balance.group, plan.streams[axis]
        self.bin = balance.data_rank * balance.shares + balance.share
        leaving = shares.leaving(balance.data_rank, balance.share)
        self.spans, self.sizes = [span for spans in leaving for span in spans], [sum(map(len, one)) for one in leaving]
        self.arriving = shares.arriving(self.bin)

    def sent(self) -> dict[str, Tensor]:
        """The spans that leave this rank, then its own padding; and all else that the device needs."""
        made = dict[str, Tensor]()
        for name, (x, dim) in self.rows.items():
            if name in self.needed:
                last = range(x.shape[dim] - self.stream.group, x.shape[dim])
                spans = [*self.spans, *[last] * self.shares.padding(self.bin)]
                made |= {
                    self._span(name, at): x.narrow(dim, one.start, len(one)).movedim(dim, 0)
                    for at, one in enumerate(spans)
                }
        for name in (name for name in self.stream.lengths if name in self.batch):
            own = [one for source, at in self.shares.bins[self.bin] for one in self.within[source][name][at]]
            own += [self.stream.group] * self.shares.padding(self.bin)
            made[name] = self.batch[name].new_tensor([own])
        order = torch.tensor(self.shares.order_at_home(self.data_rank))
        back = self.shares.returned(self.data_rank)
        made[self._key("leaving")] = torch.tensor([one for groups in back for one in groups], dtype=torch.int64)
        made[self._key("order")], made[self._key("inverse")] = order, order.argsort()
        return made

    def received(self, moved: dict[str, Tensor]) -> dict[str, Tensor]:
        """The entries with the rows that this rank computes, on the device; takes the spans out of the micro batch.

        An entry that no unit of this pipeline stage takes has its shape alone, by which stages agree on the sizes of
        messages: its values are zeros without memory.
        """
        padding, found = self.shares.padding(self.bin), dict[str, Tensor]()
        device = next(iter(moved.values())).device
        for name, (x, dim) in self.rows.items():
            rest = x.movedim(dim, 0).shape[1:]
            if name not in self.needed:
                number = sum(self.arriving) + padding * self.stream.group
                found[name] = x.new_zeros((), device=device).expand(number, *rest).movedim(0, dim)
                continue
            spans = [moved.pop(self._span(name, at)) for at in range(len(self.spans) + padding)]
            leaving = torch.cat([x.new_empty(0, *rest, device=device), *spans[: len(self.spans)]])
            arrived = leaving.new_empty(sum(self.arriving), *rest)
            dist.all_to_all_single(arrived, leaving, self.arriving, self.sizes, group=self.group)
            found[name] = torch.cat((arrived, *spans[len(self.spans) :])).movedim(0, dim).contiguous()
        return found

    def way(self, moved: dict[str, Tensor]) -> ops.RowReturn:
        """How the results return; takes the indices for it out of the micro batch."""
        leaving, order, inverse = (moved.pop(self._key(name)) for name in ("leaving", "order", "inverse"))
        sent = [len(groups) for groups in self.shares.returned(self.data_rank)]
        sizes = torch.tensor([sent, self.shares.returning(self.data_rank)])
        counts = torch.tensor([one // self.stream.group for one in self.shares.lengths[self.data_rank]])
        return ops.RowReturn(leaving, ops.Meeting(counts, order, inverse, sizes))

    def _span(self, name: str, at: int) -> str:
        return self._key(f"{name} {at}")

    def _key(self, name: str) -> str:
        return f"{self.axis} {name}"
