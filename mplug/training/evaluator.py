"""Forward passes of a whole model on micro batches, and their mean loss: the part of every stepper that trains nothing.

A run that does not train (`Run.trains`) has an `Evaluator` where a run that trains has the default stepper.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mplug.contracts.micro_batch import MicroBatch, RankBatch
from mplug.model.model import Model
from mplug.run.run import Run
from mplug.tensors.random import key_of, keys_of_samples, step_key

ENTRY = "generator_key"
"""The entry of a micro batch that holds its key: a Python int, which no unit takes."""


def micro_batch_key(seed: int, step: int, number: int) -> int:
    """The key of a step's micro batch; the first has number 0."""
    return key_of(seed, "draws", step, number)


class Evaluator:
    """Runs micro batches forward, one after the other, through all units.

    A strategy with a stepper of its own takes the entries of micro batches from `entries`, and their mean loss from
    `mean_loss`.
    """

    def __init__(self, run: Run, model: Model) -> None:
        self.run, self.model, self.sinks = run, model, model.sinks
        self.seed, self.wide = run.config.trainer.seed, run.precision.master_dtype

    def entries(self, batch: RankBatch, step: int) -> MicroBatch:
        """What this rank's units receive of a micro batch: its entries, and this step's random keys.

        `keys` [B] are those of the samples; `ENTRY` is the key of the random numbers that kernels draw themselves
        (`mplug_steps.GeneratorSeeds`). Call this method once for each micro batch.
        """
        generator_key: Any = micro_batch_key(self.seed, step, batch.number)
        return {**self.keyed(batch, step_key(self.seed, step)), ENTRY: generator_key}

    def keyed(self, batch: RankBatch, key: Tensor | int) -> MicroBatch:
        """The entries of a micro batch, and the samples' keys in the step with this key."""
        return {**batch, "keys": keys_of_samples(key, batch["sample_ids"])}

    @torch.no_grad()
    def outputs(self, micro_batches: Iterable[RankBatch]) -> list[Mapping[str, Tensor]]:
        """The activations that the last unit returns for each micro batch, without gradients or dropout."""
        self.model.module.eval()
        return [self.model.outputs(self.entries(batch, self.run.step)) for batch in micro_batches]

    def evaluate(self, micro_batches: Iterable[RankBatch]) -> Tensor:
        """The mean loss over all tokens of the micro batches, without gradients or dropout."""
        return self.mean_loss(self.outputs(micro_batches))

    def mean_loss(self, outputs: Iterable[Mapping[str, Tensor]]) -> Tensor:
        """The mean loss over the targets of all ranks; `outputs` are this rank's, with 'loss' and 'num_targets'."""
        losses = [(one["loss"], one["num_targets"]) for one in outputs]
        loss_sum, num_targets = self.run.summed(self._own_sums(losses)).unbind()
        return loss_sum / num_targets

    def _own_sums(self, losses: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[sum of losses, number of targets] of this rank; zeros if another rank counts the same losses."""
        if not losses or not self.run.counts_losses:
            return torch.zeros(2, dtype=self.wide, device=self.run.device)
        sums = [torch.stack([loss.to(self.wide), count.to(self.wide)]) for loss, count in losses]
        return torch.stack(sums).sum(dim=0)
