"""Gives completions the log-probabilities of the trainer's own forward pass, in the micro batches of their steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from mplug import IGNORED, SEQUENCES
from mplug_rollouts.groups import Item

if TYPE_CHECKING:
    from mplug import MicroBatch, Run

Batches = Callable[[Sequence[Item], int], "list[MicroBatch]"]
"""(the completions of a step, the number of its first sample) -> the micro batches of this rank."""
Scores = Callable[[Sequence["MicroBatch"]], list[Tensor]]
"""Whole micro batches -> the log-probabilities [B, S] of their labels, or nothing on ranks without the last unit."""


class Rescoring:
    """Scores the completions of a rollout, which serves whole steps, with the weights that have sampled them.

    `per_sample` are the completions of a sample. Collective.
    """

    def __init__(self, run: "Run", scores: Scores, per_sample: int) -> None:
        self.run, self.scores, self.per_sample = run, scores, per_sample

    def of(self, items: Sequence[Item], of_step: int, first: int, batches: Batches) -> list[Item]:
        """The completions of a rollout with new log-probabilities; a step takes `of_step` of them.

        A completion without a target keeps those of the sampler.
        """
        own: dict[int, list[float]] = {}
        for begin in range(0, len(items), of_step):
            number = first + begin // self.per_sample
            micro = batches(items[begin : begin + of_step], number)
            for batch, found in zip(micro, self.scores(micro), strict=False):  # none without the last unit
                own |= self._of_completions(batch, found, first)
        everywhere: dict[int, list[float]] = {}
        for found_on_rank in self.run.gathered(own):
            everywhere |= found_on_rank
        return [
            replace(item, log_probabilities=tuple(everywhere[place])) if place in everywhere else item
            for place, item in enumerate(items)
        ]

    def _of_completions(self, batch: "MicroBatch", scores: Tensor, first: int) -> Iterator[tuple[int, list[float]]]:
        """(place in the rollout, log-probabilities) of each completion with a target."""
        rows = zip(batch["sample_ids"].tolist(), batch[SEQUENCES], batch["labels"], scores, strict=True)
        for sample, sequences, labels, of_row in rows:
            for number in range(self.per_sample):
                chosen = (sequences == number) & (labels != IGNORED)
                if bool(chosen.any()):
                    yield (sample - first) * self.per_sample + number, of_row[chosen].tolist()
