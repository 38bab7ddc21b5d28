"""The stepper around another one that gives micro batches the entries which a plan recalls (`Plan.recalled`)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from mplug.contracts.micro_batch import RankBatch
from mplug.contracts.optimizer import Optimizer, Piece
from mplug.contracts.stepper import ForwardStepper, Stepper, StepResult
from mplug.model.model import Model
from mplug.run.run import Run
from mplug.training.evaluator import Evaluator
from mplug_updates.first_weights import FIRST, FirstWeights
from mplug_validation import in_place


def recalling(run: Run, model: Model, pieces: list[Piece], optimizer: Optimizer, stepper: Stepper) -> Stepper:
    """The stepper that recalls; the stepper itself if the plan recalls nothing."""
    if not isinstance(optimizer, FirstWeights):
        return stepper
    return RecallingStepper(run, model, pieces, optimizer, cast("ForwardStepper", stepper))


class RecallingStepper:
    """Runs all micro batches of a step forward with the first weights, and then the step with what they computed.

    An evaluation does the same for as many micro batches at a time as a step has. Modules whose states no gradient
    changes, but an evaluation reads, have the methods `keep_first()` and `exchange_first()`.
    """

    def __init__(
        self, run: Run, model: Model, pieces: list[Piece], optimizer: FirstWeights, stepper: ForwardStepper
    ) -> None:
        self.run, self.model, self.pieces, self.optimizer, self.stepper = run, model, pieces, optimizer, stepper
        self.count, self._is_kept = run.micro_batch_counts()[-1], False
        self._learners: list[Any] = [part for part in model.module.modules() if hasattr(part, "exchange_first")]

    def forward_backward(self, micro_batches: Iterable[RankBatch], step: int) -> None:
        """The step of the inner stepper, with the recalled entries."""
        self.stepper.forward_backward(self._recalled(micro_batches), step)

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """The update of the inner stepper."""
        return self.stepper.update(lr, weight_decay)

    def outputs(self, micro_batches: Iterable[RankBatch]) -> list[Mapping[str, Tensor]]:
        """The outputs of the inner stepper, of micro batches with the recalled entries."""
        found, batches, is_over = list[Mapping[str, Tensor]](), iter(micro_batches), False
        while not is_over:
            some = self._recalled(islice(batches, self.count))
            found += self.stepper.outputs(some)
            is_over = len(some) < self.count
        return found

    def evaluate(self, micro_batches: Iterable[RankBatch]) -> Tensor:
        """The mean loss of micro batches with the recalled entries."""
        return Evaluator(self.run, self.model).mean_loss(self.outputs(micro_batches))

    def _recalled(self, micro_batches: Iterable[RankBatch]) -> list[RankBatch]:
        """The micro batches with the recalled entries; on ranks without the last unit, these are zeros."""
        if not self._is_kept:
            self.optimizer.keep()
            for part in self._learners:
                part.keep_first()
            self._is_kept = True
        batches = list[RankBatch]()
        with in_place(FIRST, self.model, self.pieces, self.optimizer), self._first_states():
            outputs = self.stepper.outputs(self._kept(micro_batches, batches))
        return [self._with(*pair) for pair in zip(batches, outputs, strict=True)] if outputs else batches

    @contextmanager
    def _first_states(self) -> Iterator[None]:
        """In the block, modules have the states with which the run began, beside the weights."""
        for part in self._learners:
            part.exchange_first()
        yield
        for part in self._learners:
            part.exchange_first()

    def _kept(self, micro_batches: Iterable[RankBatch], batches: list[RankBatch]) -> Iterator[RankBatch]:
        """Append to `batches` each micro batch, with zeros, when the stepper takes it."""
        for batch in micro_batches:
            batches.append(self._with(batch, {}))
            yield batches[-1]

    def _with(self, batch: RankBatch, outputs: Mapping[str, Tensor]) -> RankBatch:
        """A micro batch with its recalled entries from these outputs, or zeros: all ranks know their shapes."""
        dtype = self.run.precision.master_dtype
        nothing = torch.zeros(batch["labels"].shape, dtype=dtype, device=self.run.device)
        found = {name: outputs.get(of, nothing).to(dtype) for name, of in self.model.plan.recalled.items()}
        return replace(batch, entries={**batch.entries, **found})
