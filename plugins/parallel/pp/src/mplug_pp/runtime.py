"""The stepper of the pipeline: each rank runs its stage's row of the schedule's table."""

from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from mplug import DefaultStepper, MicroBatch, Model, Run, StepResult
from mplug_pp.table import Kind, Table
from mplug_pp.wire import Wire


class PipelineStepper:
    """Runs this rank's stage; everything in a step besides the passes is delegated to the default stepper.

    Only activations that depend on a trained parameter have gradients to exchange. `returned` flags the received
    activations whose gradients go to the previous stage. `awaited` flags the sent activations (in the last stage, the
    loss) that have a gradient. A stage without awaited gradients runs forward only.
    """

    def __init__(self, run: Run, model: Model, default: DefaultStepper, schedule: Callable[[int, int], Table]) -> None:
        self.model, self.default, self.schedule = model, default, schedule
        ranks = [*run.mesh.group(run.rank, "pp")]
        self.stage, self.num_stages = ranks.index(run.rank), len(ranks)
        self.takes, self.gives = model.crossing(self.stage), model.crossing(self.stage + 1)
        self.returned = [name in model.learning(self.stage) for name in self.takes]
        learning = model.learning(self.stage + 1)
        ends = self.gives if self.stage + 1 < self.num_stages else ("loss",)
        self.awaited = [name in learning for name in ends]
        self.previous = Wire(run, ranks[self.stage - 1], self.takes) if self.stage > 0 else None
        self.next = Wire(run, ranks[self.stage + 1], self.gives) if self.stage + 1 < self.num_stages else None
        self.do: dict[Kind, Callable[[int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
        }

    def forward_backward(self, micro_batches: Iterable[MicroBatch], step: int) -> None:
        """Run this stage's actions of the table for the step's number of micro batches."""
        self.default.begin_step(step)
        self.batches = [self.default.entries(batch, step) for batch in micro_batches]
        self.taken: dict[int, list[Tensor]] = {}
        self.given: dict[int, list[Tensor]] = {}
        self.gradients: dict[int, list[Tensor]] = {}
        self.losses: list[tuple[Tensor, Tensor]] = []
        self.backwards_left = len(self.batches)
        for action in self.schedule(self.num_stages, len(self.batches))[self.stage]:
            self.do[action.kind](action.micro_batch)
        self._finish_sends()
        self.default.finish_step(self.losses)

    def _forward(self, number: int) -> None:
        with torch.set_grad_enabled(any(self.awaited)):
            values = self._run(self.batches[number], self.taken.setdefault(number, []))
        if self.next is None:
            self.losses.append((values["loss"].detach(), values["num_targets"]))
        self.given[number] = [values[name] for name in self.gives] if self.next else [values["loss"]]

    def _backward(self, number: int) -> None:
        self.backwards_left -= 1
        if self.backwards_left == 0:
            self.default.sinks.expect_last()
        given = list(compress(self.given.pop(number), self.awaited))
        taken = list(compress(self.taken.pop(number), self.returned))
        if given:
            gradients: Any = self.gradients.pop(number) if self.next else [self.default.loss_gradient(given[0])]
            # A trained unit can also output an activation of frozen parameters alone (the residual before any block).
            learning = [(one, grad) for one, grad in zip(given, gradients, strict=True) if one.requires_grad]
            if learning:
                torch.autograd.backward(*zip(*learning, strict=True))
        self.gradients[number] = [torch.zeros_like(x) if x.grad is None else x.grad for x in taken]

    def _send_forward(self, number: int) -> None:
        assert self.next is not None
        self.next.send_announced([tensor.detach() for tensor in self.given[number]], self.batches[number])

    def _receive_forward(self, number: int) -> None:
        assert self.previous is not None
        received = self.previous.receive(self.batches[number])
        self.taken[number] = [x.requires_grad_(goes) for x, goes in zip(received, self.returned, strict=True)]

    def _send_backward(self, number: int) -> None:
        assert self.previous is not None
        self.previous.send(self.gradients.pop(number))

    def _receive_backward(self, number: int) -> None:
        assert self.next is not None
        self.gradients[number] = self.next.receive_like(list(compress(self.given[number], self.awaited)))

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """Run the default stepper's update."""
        return self.default.update(lr, weight_decay)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """The mean loss of forward passes, run one micro batch at a time."""
        self.model.module.eval()
        losses = []
        for batch in micro_batches:
            batch = self.default.entries(batch, self.default.run.step)
            values = self._run(batch, self.previous.receive(batch) if self.previous else [])
            if self.next is None:
                losses.append((values["loss"], values["num_targets"]))
            else:
                self.next.send_announced([values[name] for name in self.gives], batch)
        self._finish_sends()
        return self.default.mean_loss(losses)

    def _run(self, batch: MicroBatch, taken: list[Tensor]) -> dict[str, Tensor]:
        return self.model.run({**batch, **dict(zip(self.takes, taken, strict=True))})

    def _finish_sends(self) -> None:
        for wire in (self.previous, self.next):
            if wire is not None:
                wire.finish_sends()
