"""The stepper of the pipeline: each rank runs its row of the schedule's table."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mplug import DefaultStepper, Model, RankBatch, Run, StepResult, UsageError
from mplug_pp.batches import Batches
from mplug_pp.busy import Busy
from mplug_pp.chunk import Chunk
from mplug_pp.wire import Crossing, Key, key_of, wires_of
from mplug_schedules import Action, Kind, Table, forward_half

Place = tuple[int, int]
"""(chunk, micro batch)."""


class PipelineStepper:
    """Runs this rank's chunks; everything in a step besides the passes is delegated to the default stepper.

    Activations and gradients wait in `arrived` until the pass that needs them, and in `leaving` until their send. An
    entry is a function that returns tensors: for a receive, it waits for them.
    """

    def __init__(self, run: Run, model: Model, default: DefaultStepper) -> None:
        self.model, self.default = model, default
        self.rank = [*run.mesh.group(run.rank, "pp")].index(run.rank)
        self.chunks = {number: Chunk(model, default, number) for number in model.own_chunks}
        self.crossings = {
            number: Crossing(model.crossing(number))
            for chunk in model.own_chunks
            for number in (chunk, chunk + 1)
            if 0 < number < len(model.stages.units)
        }
        self.wires = wires_of(run, model)
        self.busy = Busy(run.device)
        self.arrived: dict[tuple[bool, Place], Callable[[], list[Tensor]]] = {}
        self.leaving: dict[tuple[bool, Place], list[Tensor]] = {}
        self.do: dict[Kind, Callable[[int, int, int | None], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._backward,
            Kind.WEIGHT_GRADIENT: self._weight_gradients,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
        }

    def forward_backward(self, micro_batches: Iterable[RankBatch], step: int) -> None:
        """Run this rank's actions of the table for the step's number of micro batches."""
        self.default.begin_step(step)
        self.batches = Batches(self.default.read(micro_batches), partial(self.default.entries, step=step))
        table = self._table(self.batches.number)
        row = table.rows[self.rank]
        self.split = {(one.chunk, one.micro_batch) for one in row if one.kind is Kind.INPUT_GRADIENT}
        self.results = list[Mapping[str, Tensor]]()
        passes = Counter(name for chunk in self.chunks.values() for name in chunk.trained)
        self.default.sinks.expect_passes({name: count * self.batches.number for name, count in passes.items()})
        self.batches.expect(row)
        self.busy.begin()
        for action in row:
            self._run(action)
        self._finish_sends()
        self.batches.finish()
        self.default.finish_step([(one["loss"], one["num_targets"]) for one in self.results])

    def _table(self, num_micro_batches: int) -> Table:
        assert self.model.stages.table is not None
        table = self.model.stages.table(num_micro_batches)
        if table.ranks != self.model.stages.ranks:
            raise UsageError(
                f"the pipeline schedule '{self.model.stages.schedule}' gives chunks to other ranks for "
                f"{num_micro_batches} micro batches; use another schedule"
            )
        return table

    def _run(self, action: Action) -> None:
        self.do[action.kind](action.chunk, action.micro_batch, action.peer)
        self.batches.used(action.micro_batch)
        for wire in self.wires.values():
            wire.release()

    def _forward(self, chunk: int, number: int, _: int | None) -> None:
        own, batch = self.chunks[chunk], self.batches[number]
        taken = self.arrived.pop((True, (chunk, number)))() if chunk else []
        with self.busy.computing():
            outputs = own.forward(number, batch, taken, (chunk, number) in self.split)
        if own.is_last:
            self.results.append(outputs)
        else:
            self._hand_over(True, chunk + 1, number, chunk, list(outputs.values()))

    def _backward(self, chunk: int, number: int, _: int | None) -> None:
        own = self.chunks[chunk]
        upstream = [] if own.is_last else self.arrived.pop((False, (chunk, number)))()
        with self.busy.computing():
            gradients = own.backward(number, upstream)
        if chunk:
            self._hand_over(False, chunk - 1, number, chunk, gradients)

    def _weight_gradients(self, chunk: int, number: int, _: int | None) -> None:
        with self.busy.computing():
            self.chunks[chunk].weight_gradients(number)

    def _hand_over(self, forward: bool, receiver: int, number: int, sender: int, tensors: list[Tensor]) -> None:
        """Keep tensors for a chunk of this rank, or for the send to another rank."""
        if receiver in self.chunks:
            self.arrived[forward, (receiver, number)] = lambda: tensors
        else:
            self.leaving[forward, (sender, number)] = tensors

    def _send_forward(self, chunk: int, number: int, peer: int | None) -> None:
        assert peer is not None
        key = key_of(self.batches[number])
        self.crossings[chunk + 1].send(self.wires[peer], self.leaving.pop((True, (chunk, number))), key)

    def _receive_forward(self, chunk: int, number: int, peer: int | None) -> None:
        assert peer is not None
        key: Key = key_of(self.batches[number])
        self.arrived[True, (chunk, number)] = self.crossings[chunk].receive(self.wires[peer], key)

    def _send_backward(self, chunk: int, number: int, peer: int | None) -> None:
        assert peer is not None
        self.wires[peer].send(self.leaving.pop((False, (chunk, number))))

    def _receive_backward(self, chunk: int, number: int, peer: int | None) -> None:
        assert peer is not None
        layouts = self.chunks[chunk].gradients_of(number)
        self.arrived[False, (chunk, number)] = self.wires[peer].receive(layouts).wait

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """Run the default stepper's update; the step's figures have the measured bubble of this rank."""
        return replace(self.default.update(lr, weight_decay), measured=self.busy.measured())

    def evaluate(self, micro_batches: Iterable[RankBatch]) -> Tensor:
        """The mean loss of forward passes."""
        return self.default.mean_loss(self.outputs(micro_batches))

    @torch.no_grad()
    def outputs(self, micro_batches: Iterable[RankBatch]) -> list[Mapping[str, Tensor]]:
        """The outputs of forward passes, by the forward half of the table of the run's steps.

        Ranks without the last chunk have none.
        """
        self.model.module.eval()
        self.results, self.split = [], set()
        run = self.default.run
        entries = partial(self.default.entries, step=run.step)
        row = forward_half(self._table(max(run.micro_batch_counts()))).rows[self.rank]
        remaining = iter(micro_batches)
        while True:
            self.batches = Batches(remaining, entries, open_end=True)
            self.batches.expect(row)
            for action in row:
                if self.batches.has(action.micro_batch):
                    self._run(action)
            if self.batches.ended:
                break
        self._finish_sends()
        return self.results

    def _finish_sends(self) -> None:
        for wire in self.wires.values():
            wire.finish()
