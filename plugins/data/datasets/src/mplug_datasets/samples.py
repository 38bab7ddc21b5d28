"""Samples by their number in the global order. B samples of a micro batch, S sequence length."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mplug_tokenization.packed_samples import IGNORED, DocumentStore

PATTERN = 10_000
"""The order of the data sets in a blend repeats after this number of samples."""


class SampleSet(Protocol):
    """Samples of one data set, in one order without end."""

    count: int | None
    """The number of samples of an epoch, if it is known."""

    @property
    def fingerprint(self) -> str:
        """A digest of the samples."""

    def read(self, sample_ids: range) -> dict[str, Tensor]:
        """The micro batch of these samples."""


class TextSamples:
    """Samples of texts: an epoch shuffles the documents, concatenates them and cuts the result every S tokens.

    The samples of an epoch are shuffled too. The last cut is filled with positions without targets, so that an epoch
    reads every token once. `key` is the key of the order: the seed, and what else distinguishes this set.
    """

    def __init__(self, documents: DocumentStore, seq_length: int, filler: int, key: Sequence[int]) -> None:
        self.documents, self.seq_length, self.filler, self.key = documents, seq_length, filler, key
        self.lengths = np.asarray(documents.lengths, dtype=np.int64)
        self.tokens = int(self.lengths.sum())
        self.count = max(0, -(-(self.tokens - 1) // seq_length))
        self._epoch = -1
        self._documents = self._ends = self._samples = np.empty(0, np.int64)

    @property
    def fingerprint(self) -> str:
        """A digest of the documents, which with the settings of the run decide the samples."""
        return self.documents.fingerprint.hex()

    def read(self, sample_ids: range) -> dict[str, Tensor]:
        """The micro batch of these samples."""
        length = self.seq_length
        windows = np.full((len(sample_ids), length + 1), self.filler, dtype=np.int64)  # [B, S + 1]
        labels = np.full((len(sample_ids), length), IGNORED, dtype=np.int64)
        for row, number in enumerate(sample_ids):
            found = self._window(*divmod(number, self.count))
            windows[row, : len(found)] = found
            labels[row, : len(found) - 1] = found[1:]
        return {
            "tokens": torch.from_numpy(windows[:, :-1].copy()),
            "labels": torch.from_numpy(labels),
            "positions": torch.arange(length).expand(len(sample_ids), -1).contiguous(),
            "sample_ids": torch.tensor(list(sample_ids)),
        }

    def _window(self, epoch: int, index: int) -> NDArray[Any]:
        if epoch != self._epoch:
            random = np.random.Generator(np.random.PCG64([*self.key, epoch]))
            self._documents = random.permutation(len(self.lengths))
            self._ends = np.cumsum(self.lengths[self._documents])
            self._samples = random.permutation(self.count)
            self._epoch = epoch
        start = int(self._samples[index]) * self.seq_length
        stop = min(start + self.seq_length + 1, self.tokens)
        first, last = (int(np.searchsorted(self._ends, place, side="right")) for place in (start, stop - 1))
        found = np.concatenate([self.documents.read(int(number))[0] for number in self._documents[first : last + 1]])
        begin = start - (int(self._ends[first - 1]) if first else 0)
        return found[begin : begin + stop - start]


class Blend:
    """Samples of several data sets, mixed by weight; which set a sample comes from is a function of its number.

    A pattern of PATTERN samples repeats. It has as many samples of each set as its weight says, and the next sample is
    always that of the set that lags most behind its weight.
    """

    count = None

    def __init__(self, sets: Sequence[SampleSet], weights: Sequence[float]) -> None:
        self.sets = sets
        self.chosen, self.before = pattern(weights)

    @property
    def fingerprint(self) -> str:
        """A digest of the sets' fingerprints, in order, and of their shares."""
        parts = [(one.fingerprint, int(count)) for one, count in zip(self.sets, self.before[-1], strict=True)]
        return blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def place(self, number: int) -> tuple[int, list[int]]:
        """(the set of a sample, the number of samples of each set before it)."""
        round_, index = divmod(number, PATTERN)
        return int(self.chosen[index]), (round_ * self.before[-1] + self.before[index]).tolist()

    def read(self, sample_ids: range) -> dict[str, Tensor]:
        """The micro batch of these samples."""
        parts = []
        for number in sample_ids:
            chosen, before = self.place(number)
            parts.append(self.sets[chosen].read(range(before[chosen], before[chosen] + 1)))
        batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {**batch, "sample_ids": torch.tensor(list(sample_ids))}


def pattern(weights: Sequence[float]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(the set of each sample, the number of samples of each set before it [PATTERN + 1, sets])."""
    shares = np.asarray(weights, dtype=np.float64) / sum(weights) * PATTERN
    counts = np.maximum(np.floor(shares), 1).astype(np.int64)  # the smallest weight is one sample of a pattern
    for _ in range(PATTERN - int(counts.sum())):
        counts[int(np.argmax(shares - counts))] += 1
    while counts.sum() > PATTERN:
        counts[int(np.argmax(counts - shares))] -= 1
    chosen, before = np.empty(PATTERN, np.int64), np.zeros((PATTERN + 1, len(counts)), np.int64)
    for number in range(PATTERN):
        chosen[number] = int(np.argmax(counts * (number + 1) - before[number] * PATTERN))
        before[number + 1] = before[number]
        before[number + 1, chosen[number]] += 1
    return chosen, before
