"""Gathers the weights of a unit, and sums its gradients onto the ranks that keep the rows.

    at rest              this rank's rows of the fp32 master: the piece to update
    inside a unit        a plain parameter in the precision of the run, whole except for the split of tensor parallelism
    its gradient         a plain tensor in fp32, to which the unit's products add; reduce-scattered as a sum

The all-gather of weights and the reduce-scatter of gradients are each other's dual. If there are replicas besides this
axis (HSDP), another strategy sums the sinks over them; a sink holds only this rank's rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from mplug import GradientSink
from mplug.ops.transfers import joining_each, summing_each
from mplug_fsdp.memory import Padded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Place(NamedTuple):
    """An attribute of a module that holds a parameter; `table` are the parameters of the module by attribute."""

    table: dict[str, nn.Parameter | None]
    attribute: str


class Rows(NamedTuple):
    """This rank's rows of a parameter, the shape of the whole, the sink of the rows (None: frozen), and its places."""

    name: str
    values: nn.Parameter
    shape: tuple[int, ...]
    sink: GradientSink | None
    places: list[Place]


class Lane:
    """The stream of all collectives, in the order in which they start; on a CPU, a collective has finished at once."""

    def __init__(self, device: torch.device) -> None:
        high = -1  # so that copies and collectives start although products fill the device
        self._stream = torch.cuda.Stream(device, priority=high) if device.type == "cuda" else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the block on this stream, after everything that has been launched on the current one."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> "torch.cuda.Event | None":
        """The end of everything that has been launched on this stream."""
        return None if self._stream is None else self._stream.record_event()


def wait_for(event: "torch.cuda.Event | None") -> None:
    """Let the current stream wait for an event of the lane."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class Gathered:
    """The parameters of a unit, or of units that share one.

    Modules hold the whole parameters between `gather` and `free`, and the rows at rest: a whole parameter is never
    visible without memory.
    `collects` says that a backward pass adds to the gradients and that no sum has taken them yet.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        group: "ProcessGroup",
        lane: Lane,
        dtype: torch.dtype,
        sum_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        trained = [one for one in rows if one.sink is not None]
        self._rows, self._group, self._lane, self._device = rows, group, lane, device
        self._totals = [one.sink for one in rows if one.sink is not None]
        self._weights = Padded([one.shape for one in rows], group.size(), group.rank(), dtype, device)
        self._parameters = [
            nn.Parameter(whole, requires_grad=one.sink is not None)
            for whole, one in zip(self._weights.whole, rows, strict=True)
        ]
        kept_in = self._totals[0].buffer.dtype if self._totals else dtype
        self._sum_dtype = sum_dtype or kept_in
        self._gradients = Padded([one.shape for one in trained], group.size(), group.rank(), kept_in, device)
        learning = [one for one in self._parameters if one.requires_grad]
        gradients = zip(trained, learning, self._gradients.whole, strict=True)
        self._sinks = [GradientSink(one.name, parameter, gradient) for one, parameter, gradient in gradients]
        self._arrived: torch.cuda.Event | None = None
        self._summed: torch.cuda.Event | None = None
        self.collects = False

    # Weights.

    @torch.no_grad()
    def gather(self) -> None:
        """Start gathering the weights, unless they are here: round this rank's rows, and send them to all ranks."""
        if self._weights.is_allocated:
            return
        self._weights.allocate()
        self._put(self._parameters)
        with self._lane.entered():
            pairs = [(own, one.values) for own, one in zip(self._weights.own, self._rows, strict=True) if own.numel()]
            arriving = [values.detach().to(self._device, non_blocking=True) for _, values in pairs]  # from CPU memory
            if pairs:
                torch._foreach_copy_([own for own, _ in pairs], arriving)
            joining_each(self._weights.parts, self._group).wait()
            self._arrived = self._lane.mark()

    def wait(self) -> None:
        """Let the current stream wait for the weights."""
        wait_for(self._arrived)

    def free(self) -> None:
        """Free the memory of the weights."""
        if self._weights.is_allocated:
            self.wait()  # they may be unused
            self._put([one.values for one in self._rows])
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
        self.collects = False
        for sink in self._sinks:
            if sink.stale:  # the pass has not used this parameter
                sink.buffer.zero_()
        with self._lane.entered():
            parts = [part.to(self._sum_dtype) for part in self._gradients.parts]  # no copy if it has that dtype
            totals = [self._place_of_sum(part, sink) for part, sink in zip(parts, self._totals, strict=True)]
            summing_each(totals, parts, self._group).wait()
            for total, sink in zip(totals, self._totals, strict=True):
                rows = total[: sink.buffer.numel()].view_as(sink.buffer)
                sink.contribute(_brought(rows, sink.buffer.device))
            self._summed = self._lane.mark()

    def _place_of_sum(self, part: Tensor, sink: GradientSink) -> Tensor:
        """The buffer of a sink itself, if a sum fits there and is the first of a step; otherwise own part."""
        own, buffer = part[self._group.rank()], sink.buffer
        fits = buffer.numel() == own.numel() and (buffer.dtype, buffer.device) == (own.dtype, own.device)
        return buffer.flatten() if fits and sink.stale else own

    def release(self) -> None:
        """Let the current stream wait for the sum, and free the memory of the gradients."""
        if self._gradients.is_allocated and not self.collects:
            wait_for(self._summed)
            self._gradients.free()


def _brought(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; the values are there when the function returns."""
    if x.device == device:
        return x
    arriving = torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=True).copy_(x, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return arriving
