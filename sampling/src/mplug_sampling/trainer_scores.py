"""The log-probabilities that a run which trains gives to the targets of micro batches: by its own forward pass.

A step of one token multiplies other shapes than a pass over whole samples, so a sampler's log-probabilities differ from
the trainer's by rounding. A forward pass of the micro batches of a step, before the step, has the step's shapes and
kernels.

B samples, S positions, R ranks that divide the positions of samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from mplug import DOCUMENTS, Loader, MicroBatch, Model, RankBatch, Run
from mplug.commands import feed, forward_stepper
from mplug.contracts.stepper import ForwardStepper
from mplug_nn.objective import LOG_PROBABILITIES_OUTPUT
from mplug_ops import all_gather
from mplug_ops.whole_sequences import parts_of


class TrainerScores:
    """Runs micro batches forward with the present weights. Collective; built when the model has its memory.

    The model's objective returns log-probabilities (`mplug_nn.return_log_probabilities`).
    """

    def __init__(self, run: Run, model: Model, loader: Loader) -> None:
        self.run, self.model = run, model
        self.dividing = [axis.name for axis in run.mesh.views["dense"] if "sequence" in axis.entries]
        self.feed = feed(run, model, "train", loader)
        self.stepper = cast("ForwardStepper", forward_stepper(run, model))

    def of(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The log-probabilities [B, S] of the labels of whole micro batches; none on ranks without the last unit."""
        was_training = self.model.module.training
        outputs = self.stepper.outputs(self._with_recalled(one) for one in self.feed.step_of(batches))
        self.model.module.train(was_training)
        return [
            self._whole(one[LOG_PROBABILITIES_OUTPUT], batch).to("cpu", torch.float64)
            for one, batch in zip(outputs, batches, strict=False)  # none without the last unit
        ]

    def _whole(self, scores: Tensor, batch: MicroBatch) -> Tensor:
        """The scores [B, S / R] of this rank's positions -> those of all positions [B, S]."""
        group = self.run.group(*self.dividing) if self.dividing else None
        if group is None:
            return scores
        gathered, rows = all_gather(scores, group, 1), []
        for documents in batch[DOCUMENTS].tolist():
            parts = [
                parts_of(self.run.mesh, rank, gathered.shape[1], by_entries=True, documents=tuple(documents))
                for rank in self.run.mesh.group(self.run.rank, *self.dividing)
            ]
            held = [torch.arange(part.start, part.stop) for of_rank in parts for part in of_rank]
            rows.append(torch.cat(held).argsort())
        return gathered.gather(1, torch.stack(rows).to(gathered.device))

    def _with_recalled(self, batch: RankBatch) -> RankBatch:
        """A micro batch with zeros for what the first weights would compute: no log-probability depends on it."""
        like = batch["labels"]
        zeros = torch.zeros(like.shape, dtype=self.run.precision.master_dtype, device=like.device)
        missing: Mapping[str, Tensor] = dict.fromkeys(self.model.plan.recalled, zeros)
        return replace(batch, entries={**batch.entries, **missing})
