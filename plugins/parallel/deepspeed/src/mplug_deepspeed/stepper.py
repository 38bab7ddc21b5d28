"""The step: DeepSpeed's engine runs forward and backward, partitions gradients and gathers weights.

DeepSpeed averages gradients over ranks. The losses of mplug are sums, divided once by the number of targets of the
whole batch, which is known when the step ends. So backward starts with ranks / tokens instead of 1: after DeepSpeed's
mean over R ranks, a gradient is the sum over ranks / tokens, where `tokens` is the constant number of positions of a
batch. The host's update divides by the remaining factor targets / tokens.

The engine calls its optimizer with the partitioned gradients. This is where the host's update runs: it sums what is
partial over other axes (tensor parallelism), computes the exact norm, clips, and calls the run's optimizer.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug import DefaultStepper, RankBatch, StepResult
from mplug_deepspeed.engine import Running
from mplug_deepspeed.scaler import EngineScale

if TYPE_CHECKING:
    from mplug import Model, Run


class EngineStepper:
    """Runs the micro batches of a step through the engine, then one update inside of the engine's step."""

    def __init__(self, run: "Run", model: "Model", default: DefaultStepper, running: Running) -> None:
        self.run, self.model, self.default, self.running = run, model, default, running
        self.engine, self.partitions = running.engine, running.partitions
        trainer = run.config.trainer
        self.tokens = trainer.global_batch_size * trainer.seq_length
        self.seed = running.ranks / self.tokens
        default.gradient_scale = 1 / self.tokens
        self.scale: EngineScale | None = None
        if default.loss_scale is not None:
            self.scale = EngineScale(run, self.engine.optimizer.loss_scaler)
            default.loss_scale = self.scale
        self.added = torch.full((), self.seed, device=run.device)
        default.scale_added(self.added)
        running.update.on_step = self._receive
        self._received = 0
        self._result: StepResult | None = None

    def forward_backward(self, micro_batches: Iterable[RankBatch], step: int) -> None:
        """Run every micro batch; the last one lets DeepSpeed finish the gradients."""
        default, engine = self.default, self.engine
        default.begin_step(step)
        if self.scale is not None:
            self.added.fill_(self.seed * self.scale.begin_step())
        losses = []
        for batch in default.read(micro_batches):
            engine.set_gradient_accumulation_boundary(batch.is_last)
            loss, num_targets = self.model.loss(default.entries(batch, step))
            engine.backward(loss * self.seed, scale_wrt_gas=False)
            losses.append((loss.detach(), num_targets))
        default.count(losses)

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """Let the engine step; its optimizer runs the host's update. An overflow that DeepSpeed finds skips it."""
        self.default.set_rates(lr, weight_decay)
        self._result, self._received = None, 0
        for group in self.running.update.param_groups:
            group["lr"] = lr
        self.engine.step()
        if self._result is None:
            self._overflow()
        elif len(self.partitions.flats) > 1:
            self.partitions.write_weights()
        self.model.weights_version += 1
        assert self._result is not None
        return self._result

    def _receive(self, flats: list[Tensor]) -> None:
        """Take over the gradients of some partitions; after the last, update all pieces."""
        for flat in flats:
            self.partitions.receive(flat)
        self._received += len(flats)
        if self._received == len(self.partitions.flats):
            if self.scale is not None:
                self.default.gradient_scale = self.scale.left / self.tokens
            self.default.reduction.finish()
            self._result = self.default.apply(self.default.norm(), _nothing)

    def _overflow(self) -> None:
        self.partitions.blank()
        infinite = torch.full((), float("inf"), device=self.run.device)
        self._result = self.default.apply(infinite, _nothing)

    def evaluate(self, micro_batches: Iterable[RankBatch]) -> Tensor:
        """The mean loss over all tokens of the micro batches, without gradients or dropout."""
        return self.default.evaluate(micro_batches)


def _nothing() -> None:
    """The engine writes the weights after its optimizer's step."""
