"""Schedules the sums of gradient buckets onto their owners: while backward runs, in the same order on all ranks.

Ranks whose backward passes differ (an expert without tokens) complete buckets in different orders, but must sum the
same buckets together. Also, all ranks of two groups must start the sums of both in the same order.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mplug import Model, rounding_of_sums
from mplug_zero.groups import Axes, Pair, group_of
from mplug_zero.sums import Lane, Sums

if TYPE_CHECKING:
    from mplug import Run
    from mplug_zero.config import ZeROConfig

IN_FLIGHT = 2
"""When a transient bucket gets memory, at most IN_FLIGHT - 1 other sums stay in flight.

More would hide no more communication and would cost memory.
"""


class WholeGradients:
    """Stage 1: each rank accumulates the gradients of all micro batches, and buckets are summed once per step."""

    def __init__(self, lanes: list[Lane], sums: Sums, overlap: bool) -> None:
        self.lanes, self.sums, self.overlap = lanes, sums, overlap
        self.num_begun = 0
        for lane in lanes:
            for sink in lane.sinks:
                sink.listeners.append(lambda _, lane=lane: self._hear(lane))

    def _hear(self, lane: Lane) -> None:
        lane.num_missing -= 1
        if self.overlap:
            self._advance()

    def _advance(self) -> None:
        while self.num_begun < len(self.lanes) and self.lanes[self.num_begun].num_missing == 0:
            self.sums.begin(self.lanes[self.num_begun], last=True)
            self.num_begun += 1

    def wait(self) -> None:
        """Wait for all sums, and reset for the next step."""
        self._advance()
        assert self.num_begun == len(self.lanes), "a gradient is not final"
        self.sums.end()
        self.num_begun = 0
        for lane in self.lanes:
            lane.num_missing, lane.num_sums = len(lane.sinks), 0


class TransientGradients:
    """Stage 2: each backward pass sums its own gradients, bucket by bucket, into the gradients that the owners keep.

    A bucket gets memory when backward reaches a unit with a parameter in it. By the end of a pass, every bucket has
    been summed once, even if the pass did not touch it. So all ranks issue the same sums without negotiation.
    """

    def __init__(self, model: Model, lanes: list[Lane], sums: Sums, overlap: bool) -> None:
        self.lanes, self.sums, self.overlap = lanes, sums, overlap
        self.num_begun = 0
        self.is_passing = False
        self.present: set[int] = set()
        for lane in lanes:
            for sink in lane.sinks:
                sink.passed.append(lambda _, lane=lane: self._hear(lane))
        of = {sink.name: number for number, lane in enumerate(lanes) for sink in lane.sinks}
        names = {id(parameter): name for name, parameter in model.parameters().items()}
        for unit in model.own_units:
            module = model.module.get_submodule(unit.name)
            held = sorted({of[name] for parameter in module.parameters() if (name := names[id(parameter)]) in of})
            if held:
                setattr(module, unit.method, self._around(getattr(module, unit.method), held))

    def _around(self, inner: Callable[..., Any], held: list[int]) -> Callable[..., Any]:
        """A unit's call, perhaps of another method than `forward`, which would run no hook of the module."""

        @wraps(inner)
        def call(*arguments: Any, **named: Any) -> Any:
            outputs = inner(*arguments, **named)
            self._before_backward(outputs, held)
            return outputs

        return call

    def _before_backward(self, outputs: Any, held: list[int]) -> None:
        """Hook the outputs of a unit so that its buckets get memory when backward reaches this call."""
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: self._enter(held))

    def _enter(self, held: Iterable[int]) -> None:
        if not self.is_passing:
            self.is_passing = True
            torch.autograd.Variable._execution_engine.queue_callback(self._leave)  # type: ignore[attr-defined]
        for number in held:
            if number >= self.num_begun:
                self._provide(number)

    def _provide(self, number: int) -> None:
        if number not in self.present:
            lane = self.lanes[number]
            self.sums.end(0 if lane in self.sums else IN_FLIGHT - 1)
            lane.shard.materialize()
            self.present.add(number)

    def _hear(self, lane: Lane) -> None:
        lane.num_missing -= 1
        while self.num_begun < len(self.lanes) and self.lanes[self.num_begun].num_missing == 0:
            self._begin()

    def _begin(self) -> None:
        """Start the sum of the next bucket; a gradient without a contribution in this pass counts as zeros."""
        lane = self.lanes[self.num_begun]
        last = any(sink.last for sink in lane.sinks)
        for sink in lane.sinks:
            if sink.last:
                sink.finish()
            elif sink.stale:
                sink.buffer.zero_()
        self.sums.begin(lane, last)
        for sink in lane.sinks:
            sink.stale.fill_(True)
        self.present.discard(self.num_begun)
        self.num_begun += 1
        if not self.overlap:
            self.sums.end()

    def _leave(self) -> None:
        """At the end of a backward pass, sum the remaining buckets and reset for the next pass."""
        while self.num_begun < len(self.lanes):
            self._provide(self.num_begun)
            self._begin()
        self.num_begun, self.is_passing = 0, False
        for lane in self.lanes:
            lane.num_missing = len(lane.sinks)

    def wait(self) -> None:
        """Wait for all sums, and reset for the next step."""
        self.sums.end()
        for lane in self.lanes:
            lane.num_sums = 0


def sum_onto_owners(
    run: "Run", model: Model, groups: Mapping[tuple[Axes, Axes], Pair], config: "ZeROConfig"
) -> WholeGradients | TransientGradients:
    """Install the summation of every bucket's gradients onto their owners, as configured."""
    assert model.shards is not None
    sinks, shards = model.sinks, model.shards
    lanes = [Lane(one, group_of(groups, one.bucket), [sinks[name] for name in one.bucket.names]) for one in shards.all]
    one = shards.all[0]
    sums = Sums(_dtype_of_sums(run, config, one.gradients.dtype), one.weights.device)
    summing: WholeGradients | TransientGradients
    if shards.sharding.transient:
        summing = TransientGradients(model, lanes, sums, config.overlap)
    else:
        summing = WholeGradients(lanes, sums, config.overlap)
    sinks.when_finished.append(summing.wait)
    return summing


def _dtype_of_sums(run: "Run", config: "ZeROConfig", gradients: torch.dtype) -> torch.dtype:
    """The configured format of sums if it is narrower than fp32; otherwise that of the gradients."""
    is_exact = rounding_of_sums(config.reduce_dtype) is None
    return gradients if is_exact else run.precision.sum_dtype(config.reduce_dtype)
