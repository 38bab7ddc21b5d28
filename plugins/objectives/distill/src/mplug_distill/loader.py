"""A loader that adds a teacher's log-probabilities to the samples of another one."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mplug import IGNORED, TOP_TAUGHT, TOP_TOKENS, Loader, MicroBatch
from mplug_distill.top_file import TopFile

IMPOSSIBLE = -1e4
"""The log-probability in micro batches, which have finite numbers alone, of what has the probability 0."""


class TaughtLoader(Loader):
    """The samples of `inner` with the entries of a file. The order and the state are those of `inner`."""

    def __init__(self, inner: Loader, file: TopFile) -> None:
        self.inner, self.file = inner, file
        self.vocab_size, self.tokenizer = inner.vocab_size, inner.tokenizer
        self.samples_per_epoch, self.merge_states = inner.samples_per_epoch, inner.merge_states
        if inner.fingerprint is not None:
            self.fingerprint = f"{inner.fingerprint}-{file.contents}"

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """This rank's part of the next `num_samples` global samples, in micro batches."""
        return (self._with_teacher(batch) for batch in self.inner.take(num_samples))

    def _with_teacher(self, batch: MicroBatch) -> MicroBatch:
        labels, k = batch["labels"].cpu().numpy(), self.file.origin.k
        rows = batch["tokens"].cpu().numpy()
        tokens = np.zeros((*labels.shape, k), np.int64)
        logs = np.zeros((*labels.shape, k + 1), np.promote_types(self.file.log_probabilities.dtype, np.float32))
        for row, number in enumerate(batch["sample_ids"].tolist()):
            targets = labels[row] != IGNORED
            tokens[row, targets], found = self.file.read(number, rows[row], labels[row])
            logs[row, targets] = np.maximum(found, IMPOSSIBLE)
        return {**batch, TOP_TOKENS: torch.from_numpy(tokens), TOP_TAUGHT: torch.from_numpy(logs)}

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader inside."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the loader inside."""
        self.inner.load_state_dict(state)
