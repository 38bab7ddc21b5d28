"""The share of targets whose label has the highest logit, beside models that know the labels' frequencies alone."""

from collections.abc import Iterable, Iterator
from math import log, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mplug import IGNORED, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from mplug import Model, RankBatch, Run


class Shares(NamedTuple):
    """Of all targets, the share whose label has the highest logit, and that of the most common label.

    `unigram_loss` is the mean loss in nats of a model that knows the frequencies of these labels and nothing else:
    their entropy. No unigram model has a lower loss on them.
    """

    accuracy: float
    most_common: float
    unigram_loss: float


class Hits:
    """Micro batches; while they pass, their logits are computed and compared with their labels.

    Raises UsageError unless each rank has the whole model and whole samples.
    """

    def __init__(self, run: "Run", model: "Model", stepper: Any, batches: "Iterable[RankBatch]") -> None:
        _refuse_divided(run, model)
        self._run, self._model, self._stepper, self._batches = run, model, stepper, batches
        self._hits = torch.zeros(1, dtype=torch.int64, device=run.device)
        self._counts = torch.zeros(1, dtype=torch.int64, device=run.device)

    def __iter__(self) -> "Iterator[RankBatch]":
        for batch in self._batches:
            logits, labels = self._model.logits(self._stepper.entries(batch, self._run.step)), batch["labels"]
            counted = labels != IGNORED
            self._hits += ((logits.argmax(dim=-1) == labels) & counted).sum()
            self._count(labels[counted], logits.shape[-1])
            yield batch

    def _count(self, labels: "Tensor", number: int) -> None:
        if len(self._counts) != number:
            self._counts = torch.zeros(number, dtype=torch.int64, device=self._run.device)
        self._counts += torch.bincount(labels, minlength=number)

    def shares(self) -> Shares:
        """The shares of the targets of all ranks. Collective."""
        own = torch.cat([self._hits, self._counts])
        hits, *counts = self._run.summed(own if self._run.counts_samples else torch.zeros_like(own)).tolist()
        frequencies = [count / sum(counts) for count in counts if count]
        return Shares(hits / sum(counts), max(frequencies), -sum(one * log(one) for one in frequencies))


def _refuse_divided(run: "Run", model: "Model") -> None:
    if not model.plan.inference:
        raise UsageError("--accuracy compares logits with labels, and the plan of the model has none; leave it out")
    divides = [axis for axis in run.mesh.axes.values() if axis.size > 1 and {*axis.entries} != {"batch"}]
    rank_has = {
        name: sum(box.numel for box in placement.boxes(run.rank)) for name, placement in model.placements.items()
    }
    if divides or any(rank_has[name] != prod(one.shape) for name, one in model.placements.items()):
        raise UsageError("--accuracy needs the whole model on each rank; leave --parallel out, or use dp")
