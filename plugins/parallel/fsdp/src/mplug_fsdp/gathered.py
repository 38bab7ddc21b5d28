"""Gathers the weights of a unit, and sums its gradients onto the ranks that keep the rows.

    at rest              this rank's rows of the fp32 master: the piece to update
    inside a unit        a plain parameter in the precision of the run, whole except for the split of tensor parallelism
                         (or the whole copies that its product reads, and a parameter without values)
    its gradient         a plain tensor in fp32, to which the unit's products add; reduce-scattered as a sum

The all-gather of weights and the reduce-scatter of gradients are each other's dual. If there are replicas besides this
axis (HSDP), another strategy sums the sinks over them; a sink holds only this rank's rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

import mplug_ops as ops
from mplug import GradientSink
from mplug_fsdp.copies import Rows, UnitCopies, formats_of
from mplug_fsdp.memory import Format, Padded
from mplug_fsdp.peer_rows import PeerRows
from mplug_fsdp.peer_sums import PeerSums
from mplug_ops.lanes import Lane, wait_for
from mplug_ops.transfers import join_each, sum_each

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Formats(NamedTuple):
    """The dtypes of gathered weights, of the gradients of a unit, and of their sums over ranks."""

    weights: torch.dtype
    gradients: torch.dtype
    sums: torch.dtype


class Peers(NamedTuple):
    """The memories through which weights and gradients travel; None: by messages of the group."""

    rows: PeerRows | None = None
    sums: PeerSums | None = None


class Gathered:
    """The parameters of a unit, or of units that share one.

    Modules hold the whole parameters between `gather` and `free`, and the rows at rest: a whole parameter is never
    visible without memory. `collects` says that a backward pass adds to the gradients, not summed yet.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        group: "ProcessGroup",
        lane: Lane,
        formats: Formats,
        device: torch.device,
        peers: Peers = Peers(),  # noqa: B008 (immutable)
    ) -> None:
        self._group, self._lane, self._device = group, lane, device
        self._plain, cast = ([one for one in rows if (one.copies is None) is plain] for plain in (True, False))
        self._rows = rows = [*self._plain, *cast]
        self._sum_dtype, size, rank = formats.sums, group.size(), group.rank()
        travelling = [Format(one.shape, formats.weights) for one in self._plain]
        travelling += [form for one in cast if one.copies is not None for form in formats_of(one.copies)]
        self._weights = Padded(travelling, size, rank, device)
        self._peers, self._number = peers, peers.rows.add(self._weights.parts) if peers.rows is not None else 0
        gathered = self._weights.whole[len(self._plain) :]
        self._copies = UnitCopies(cast, gathered, formats.weights, group, device) if cast else None
        whole = [
            *self._weights.whole[: len(self._plain)],
            *(_without_values(one, formats.weights, device) for one in cast),
        ]
        self._parameters = [
            nn.Parameter(values, requires_grad=one.sink is not None) for values, one in zip(whole, rows, strict=True)
        ]
        trained = [(one, new) for one, new in zip(rows, self._parameters, strict=True) if new.requires_grad]
        self._gradients = Padded([Format(one.shape, formats.gradients) for one, _ in trained], size, rank, device)
        self._sinks = [
            GradientSink(one.name, new, gradient)
            for (one, new), gradient in zip(trained, self._gradients.whole, strict=True)
        ]
        self._sent_dtype = formats.sums
        if peers.sums is not None:
            if torch.promote_types(formats.gradients, formats.sums) == formats.sums:
                self._sent_dtype = formats.gradients  # widened where it arrives
            peers.sums.make_room([part.shape[1:] for part in self._gradients.parts], self._sent_dtype)
        self._totals = [one.sink for one in rows if one.sink is not None]
        self._exchanges = [
            ops.Exchange("weights of a unit", group, (ops.Item(one.name, one.shape) for one in rows)),
            ops.Exchange("gradients of a unit", group, (ops.Item(one.name, one.shape) for one, _ in trained)),
        ]
        for sink in self._totals:
            sink.listeners.append(self._overwritten)
        self._is_rounded = self.collects = False
        self._arrived: torch.cuda.Event | None = None
        self._summed: torch.cuda.Event | None = None

    # Weights.

    @torch.no_grad()
    def gather(self) -> None:
        """Start gathering the weights, unless they are here: round this rank's rows, and send them to all ranks."""
        if self._weights.is_allocated:
            return
        self._exchanges[0].check()
        self._weights.allocate()
        self._put(self._parameters)
        if self._copies is not None:
            self._copies.show()
        if self._peers.rows is not None:
            self._arrived = self._peers.rows.gather(self._number, self._weights.parts, self._write)
            return
        with self._lane.entered():
            parts, sent = self._weights.parts, self._rounded()
            if self._copies is not None:  # in one launch, which requires one dtype
                parts = [part.view(torch.uint8) for part in parts]
                sent = [one.view(torch.uint8) for one in (*sent, *self._copies.cast())]
            join_each(parts, sent, self._group)
            self._arrived = self._lane.mark()

    def _rounded(self) -> list[Tensor]:
        """What this rank sends of weights: its rows in the precision of the weights, with padding.

        Rows that have this precision are sent as they are. Others are rounded into the buffer of their sink while it is
        stale: there they last until backward has left the unit, which then needs no second rounding. If they do not fit
        there, or if the buffer has a gradient, they are rounded into their place among the gathered rows.
        """
        sent, rounded, sources = list[Tensor](), list[Tensor](), list[Tensor]()
        num = len(self._plain)  # copies follow
        for part, own, one in zip(self._weights.parts[:num], self._weights.own[:num], self._plain, strict=True):
            place, values = part[self._group.rank()], one.values.detach()
            if _can_replace(values, place):
                sent.append(values.flatten())
                continue
            kept = None if one.sink is None or not one.sink.stale else one.sink.buffer.flatten().view(place.dtype)
            if kept is not None and _can_replace(kept[: own.numel()], place):
                sent.append(kept[: own.numel()])
            else:
                sent.append(place)
            if values.numel() and (sent[-1] is place or not self._is_rounded):
                rounded.append(sent[-1][: own.numel()].view_as(own))
                sources.append(values.to(self._device, non_blocking=True))  # from CPU memory
        if rounded:
            torch._foreach_copy_(rounded, sources)
        self._is_rounded = all(sink.stale for sink in self._totals)
        return sent

    def _write(self, places: list[Tensor]) -> None:
        """Write what this rank sends, its rows [n] in the precision of the weights and its copies, to these places."""
        num = len(self._plain)  # copies follow
        own = [(place, one.values.detach()) for place, one in zip(places[:num], self._plain, strict=True)]
        own = [(place[: values.numel()].view_as(values), values) for place, values in own if values.numel()]
        if own:
            sources = [values.to(self._device, non_blocking=True) for _, values in own]  # from CPU memory
            torch._foreach_copy_([place for place, _ in own], sources)
        if self._copies is not None:
            for place, copy in zip(places[num:], self._copies.cast(), strict=True):
                place.copy_(copy)

    def _overwritten(self, _: GradientSink) -> None:
        self._is_rounded = False

    def forget(self) -> None:
        """Free the weights, because the rows have new values."""
        self.free()
        self._is_rounded = False
        if self._copies is not None:
            self._copies.forget()
        if self._peers.rows is not None:
            self._peers.rows.forget()

    def wait(self) -> None:
        """Let the current stream wait for the weights."""
        wait_for(self._arrived)

    def free(self) -> None:
        """Free the memory of the weights."""
        if self._weights.is_allocated:
            self.wait()  # they may be unused
            self._put([one.values for one in self._rows])
            if self._copies is not None:
                self._copies.hide()
            self._weights.free()

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the modules hold these parameters."""
        for one, parameter in zip(self._rows, parameters, strict=True):
            for place in one.places:
                place.table[place.attribute] = parameter

    # Gradients.

    def collect(self) -> None:
        """Allocate memory for the gradients of a backward pass."""
        if self._sinks and not self.collects:
            self.release()
            self._gradients.allocate()
            self.collects = True
            for sink in self._sinks:
                sink.begin_step()

    @torch.no_grad()
    def sum(self) -> None:
        """Start to sum the gradients over the ranks, onto the sinks of this rank's rows."""
        self._exchanges[1].check()
        self.collects = self._is_rounded = False
        for sink in self._sinks:
            if sink.stale:  # the pass has not used this parameter
                sink.buffer.zero_()
        with self._lane.entered():
            parts = [part.to(self._sent_dtype) for part in self._gradients.parts]  # no copy if it has that dtype
            totals = [self._place_of_sum(part, sink) for part, sink in zip(parts, self._totals, strict=True)]
            if self._peers.sums is not None:
                self._peers.sums.sum_each(totals, parts)
            else:
                sum_each(totals, parts, self._group)
            for total, sink in zip(totals, self._totals, strict=True):
                rows = total[: sink.buffer.numel()].view_as(sink.buffer)
                sink.contribute(_brought(rows, sink.buffer.device))
            self._summed = self._lane.mark()

    def _place_of_sum(self, part: Tensor, sink: GradientSink) -> Tensor:
        """The buffer of a sink, if a sum fits there and is the first of a step; otherwise own part, or new memory."""
        own, buffer = part[self._group.rank()], sink.buffer.flatten()
        wanted = own.numel(), self._sum_dtype, own.device
        if sink.stale and (buffer.numel(), buffer.dtype, buffer.device) == wanted:
            return buffer
        return own if own.dtype == self._sum_dtype else own.new_empty(own.shape, dtype=self._sum_dtype)

    def release(self) -> None:
        """Let the current stream wait for the sum, and free the memory of the gradients."""
        if self._gradients.is_allocated and not self.collects:
            wait_for(self._summed)
            self._gradients.free()


def _without_values(one: Rows, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight whose copies are gathered, for its shape and its gradient: code that reads it gets NaN."""
    return torch.full((1,) * len(one.shape), torch.nan, dtype=dtype, device=device).expand(one.shape)


def _can_replace(x: Tensor, own: Tensor) -> bool:
    """Whether a collective can use x instead of this rank's own part [n] of a tensor."""
    return (x.numel(), x.dtype, x.device) == (own.numel(), own.dtype, own.device)


def _brought(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; the values are there when the function returns."""
    if x.device == device:
        return x
    arriving = torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=True).copy_(x, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return arriving
