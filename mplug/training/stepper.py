"""The default stepper, and the functions of a step that every stepper calls. The CPU never waits for the device here.

A step in order: `begin_step`, `read`, then for each micro batch `entries` and `backward`; `finish_step`, and `update`.
`accumulate` and `apply` are the parts that a CUDA graph can replay (`trainer.graphs`): everything that changes
from step to step enters them as a tensor, and what outlives a step is changed in place.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import length_hint

import torch
from torch import Tensor

from mplug.contracts.micro_batch import MicroBatch, RankBatch
from mplug.contracts.optimizer import Optimizer, Piece, StepScalars, updated_on
from mplug.contracts.stepper import StepResult
from mplug.gradients.norm import GlobalNorm, owned_gradients
from mplug.model.model import Model
from mplug.model.pieces import write_weights
from mplug.run.run import Run
from mplug.tensors.host_buffers import fill_host_buffers
from mplug.training.batch_parts import rows_by_entry
from mplug.training.evaluator import Evaluator
from mplug.training.steps import ScalesLosses, loss_scale_of, reduction_of, statistics_of, token_scale_of


class Announced:
    """An iterator over the micro batches of a step that calls `micro_batch_began` for each."""

    def __init__(self, run: Run, batches: Iterable[RankBatch], count: int) -> None:
        self._run, self._batches, self._count = run, iter(batches), count

    def __length_hint__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        batch = next(self._batches)
        self._run.hooks.observe("micro_batch_began", run=self._run, number=batch.number, count=self._count)
        return batch


class DefaultStepper(Evaluator):
    """Runs micro batches in order through all units, then one update. Its methods are the functions of every step.

    A strategy with a stepper of its own calls the methods `begin_step`, `entries`, `loss_gradient`, `finish_step` and
    `update` of this one, and takes the step's micro batches from `read`. A stepper of another framework, whose engine
    keeps gradients itself (`Sharding.engine`), calls `begin_step`, `read`, `entries` and `count`, and in the update
    `set_rates`, `reduction.finish`, `norm` and `apply`. It sets `gradient_scale`, the factor that the gradients of
    pieces then have, and `loss_scale` if its engine has a loss scale of its own. It calls `scale_added` with the factor
    that the loss has when backward starts.
    """

    def __init__(self, run: Run, model: Model, pieces: list[Piece], optimizer: Optimizer) -> None:
        super().__init__(run, model)
        self.pieces, self.optimizer = pieces, optimizer
        self.max_norm = run.config.trainer.max_grad_norm
        device = updated_on(pieces, run.device)
        self.norm = GlobalNorm(owned_gradients(pieces, run.rank), device.type, self.wide)
        self.reduction = reduction_of(run, model, pieces)
        self.statistics = statistics_of(run, model)
        self.loss_scale: ScalesLosses | None = loss_scale_of(run, model.module)
        scale = None if self.loss_scale is None else self.loss_scale.scale
        self.token_scale = token_scale_of(run, model.module, scale)
        self.gradient_scale: Tensor | float | None = None
        self.scalars = StepScalars.zeros(device)
        self.stop = torch.zeros((), dtype=self.wide, device=run.device)
        self.sums = torch.zeros(2, dtype=self.wide, device=run.device)
        self.stop_at_nonfinite = run.config.trainer.nonfinite == "stop"
        self.halted = torch.zeros((), device=run.device)
        self.positions, self.is_complete = 0, False
        self.rows = {name: [0, 0] for stream in model.plan.streams.values() for name in stream.lengths}
        self.computed = dict.fromkeys(model.plan.streams, 0)

    def begin_step(self, step: int) -> None:
        """Set training mode, mark gradients as stale, and set statistics to zero."""
        self.model.module.train()
        self.positions, self.is_complete = 0, False
        self.rows = {name: [0, 0] for name in self.rows}
        self.computed = dict.fromkeys(self.computed, 0)
        self.token_scale.begin_step()
        self.sinks.begin_step()
        self.statistics.begin_step()

    def read(self, micro_batches: Iterable[RankBatch]) -> Iterable[RankBatch]:
        """The step's micro batches, after `begin_step`; observers hear when the stepper takes one.

        They are read on request, unless a loss inside of blocks is a mean over tokens (`token_scale`): then all are
        read here. Collective.
        """
        return Announced(self.run, self.token_scale.read(micro_batches), length_hint(micro_batches))

    def keyed(self, batch: RankBatch, key: Tensor | int) -> MicroBatch:
        """The entries of a micro batch, and the samples' keys in the step with this key."""
        self.positions += batch.positions
        for name, counted in batch.rows.items():
            self.rows[name] = [sum(pair) for pair in zip(self.rows[name], counted, strict=True)]
        for axis in self.computed:
            self.computed[axis] += max(rows_by_entry(batch, self.model.plan, axis).values(), default=0)
        self.is_complete = batch.is_last
        return super().keyed(batch, key)

    def forward_backward(self, micro_batches: Iterable[RankBatch], step: int) -> None:
        """Sum the gradients of a step's micro batches into the sinks, and sum their losses and target counts."""
        self.begin_step(step)
        self.accumulate(self.read(micro_batches), partial(self.entries, step=step))

    def accumulate(self, micro_batches: Iterable[RankBatch], entries: Callable[[RankBatch], MicroBatch]) -> None:
        """Run forward and backward of every micro batch; `entries` returns what the units receive of one."""
        losses = []
        for batch in micro_batches:
            if batch.is_last:
                self.sinks.expect_last()
            loss, num_targets = self.model.loss(entries(batch))
            loss.backward(self.loss_gradient(loss))
            losses.append((loss.detach(), num_targets))
        self.finish_step(losses)

    def loss_gradient(self, loss: Tensor) -> Tensor | None:
        """The gradient with which a micro batch's backward starts; None means 1."""
        return None if self.loss_scale is None else self.loss_scale.gradient_of(loss)

    def finish_step(self, losses: list[tuple[Tensor, Tensor]]) -> None:
        """Finish the gradients, and `count` the losses."""
        self.sinks.finish()
        self.reduction.finish()
        self.count(losses)

    def count(self, losses: list[tuple[Tensor, Tensor]]) -> None:
        """Keep this rank's sums of `losses`: (loss, number of targets) per micro batch."""
        if not self.is_complete:
            raise RuntimeError("the stepper has not run the last micro batch of the step (RankBatch.is_last)")
        self.sums = self._own_sums(losses)

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """Compute the norm and the loss, check that both are finite, and let the optimizer update its pieces.

        The optimizer applies clipping and the division by the token count (`StepScalars.scale`).
        """
        self.set_rates(lr, weight_decay)
        return self.apply(self.norm(), self.model.weights_written)

    def set_rates(self, lr: float, weight_decay: float) -> None:
        """Write the values that the CPU decides for an update into tensors on the device, which `apply` reads.

        Fills, unlike copies from the CPU's memory, never make the CPU wait.
        """
        self.scalars.lr.fill_(lr)
        self.scalars.weight_decay.fill_(weight_decay)
        self.stop.fill_(float(self.run.stop_requested or self.run.relayout_requested))

    def scale_added(self, scale: Tensor) -> None:
        """Set the factor on the gradients that blocks add themselves (load balancing) to that of the loss."""
        self.token_scale.loss_scale = scale
        fill_host_buffers(self.model.module, "loss scale", scale)

    def apply(self, norm: Tensor, written: Callable[[], None]) -> StepResult:
        """Update all pieces with the rates of `set_rates`; `norm` [] is that of this rank's gradients.

        It calls `written` when this rank's pieces have their new weights.
        """
        if self.token_scale.is_missing:
            raise RuntimeError(
                "a loss inside of the model's blocks is a mean over tokens, and its factor is not set: the stepper "
                "must take the step's micro batches from default.read(micro_batches)"
            )
        squares = norm.square().to(self.run.device)
        numbers = [self.positions, *(number for pair in self.rows.values() for number in pair)]
        counts = [torch.full_like(squares, float(one if self.run.counts_samples else 0)) for one in numbers]
        sums = self.run.summed_within_worker(torch.stack([*self.sums, squares, self.stop, *counts]))
        loss_sum, num_targets, squares = sums[:3].unbind()
        counted = num_targets * self._scale_of_gradients()
        loss, norm, scale = loss_sum / num_targets, squares.sqrt() / counted, 1 / counted
        if self.max_norm > 0:
            scale = scale * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.run.mesh.independent:
            of_all = self._of_workers(torch.stack([loss, norm, *sums]))
            loss, norm, sums = of_all[0], of_all[1], of_all[2:]
        _, num_targets, _, stop, num_tokens, *rows = sums.unbind()
        skip, failed, figures = self._check_finite(loss, norm)
        figures |= self._imbalances(squares)
        statistics, lr = self.statistics.finish(num_targets, num_tokens), self.scalars.lr
        totals = self.statistics.totals
        self.optimizer.step(replace(self.scalars, scale=scale.to(lr), skip=skip.to(lr.device), statistics=totals))
        if not self.optimizer.one_pass:
            write_weights(self.pieces)
        written()
        self.statistics.tell(skip)
        pairs = zip(self.rows, zip(rows[::2], rows[1::2], strict=True), strict=True)
        rows_of = {name: torch.stack(pair) for name, pair in pairs}
        return StepResult(loss, norm, num_targets, skip, stop, statistics, failed, figures, rows=rows_of)

    def _of_workers(self, figures: Tensor) -> Tensor:
        """[loss, norm, sums]: the means of loss and norm over independent workers, and the totals of the sums.

        A step that is not finite on one worker is skipped by all.
        """
        means = self.run.averaged_over_workers(figures)
        return torch.cat((means[:2], means[2:] * self.run.mesh.worker(self.run.rank)[1]))

    def _imbalances(self, like: Tensor) -> dict[str, Tensor]:
        """The rows of each stream on the rank that computes the most of them in the step, over the mean of ranks."""
        if not self.computed:
            return {}
        own = torch.stack([torch.full_like(like, float(rows)) for rows in self.computed.values()])
        found = self.run.largest(own) * self.run.mesh.world_size / self.run.summed(own)
        return {f"{axis}_imbalance": one for axis, one in zip(self.computed, found.unbind(), strict=True)}

    def _scale_of_gradients(self) -> Tensor | float:
        if self.gradient_scale is not None:
            return self.gradient_scale
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def _check_finite(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(skip: 1 if the step is skipped, failed: 1 if that is a failure, figures of the loss scale).

        It also updates the loss scale. The overflow of a scaled gradient is no failure: the scale falls for the next
        step.
        """
        skip = ~(norm.isfinite() & loss.isfinite())
        failed, overflow = skip, skip & loss.isfinite()
        if self.loss_scale is not None:
            failed = (skip & ~overflow) | self.loss_scale.failed(overflow)
        if self.stop_at_nonfinite:  # the CPU reads `failed` one step later; until then no step may change weights
            self.halted.copy_(torch.maximum(self.halted, failed.float()))
            skip = skip | (self.halted > 0)
        figures = {}
        if self.loss_scale is not None:
            used = self.loss_scale.scale.clone()
            self.loss_scale.update(overflow, self.halted > 0)
            figures = {"loss_scale": used, "overflows": self.loss_scale.overflows.clone()}
        return skip.float(), torch.maximum(failed.float(), self.halted), figures
