"""Samples of packed texts. B samples of a micro batch, S sequence length, M documents of a sample."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from mplug import IGNORED
from mplug_labelled.encoding import Document
from mplug_tokenization.packing import best_fit_decreasing


class PackedTexts:
    """Samples by their number in the global order: every epoch reads each packed sample once, in its own order.

    An item is one document or a pair of them, which stay together. The packing is the same in every epoch.
    """

    def __init__(self, items: Sequence[Sequence[Document]], seq_length: int, most: int, filler: int, seed: int) -> None:
        self.items, self.seq_length, self.most, self.filler, self.seed = items, seq_length, most, filler, seed
        lengths = [sum(len(tokens) for tokens, _ in item) for item in items]
        each = max(len(item) for item in items)
        self.packed = best_fit_decreasing(lengths, seq_length, (most - 1) // each)  # one is reserved for the filler
        self.count = len(self.packed)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens and labels, and of the settings of the packing."""
        found = blake2b(repr((self.seq_length, self.most, self.filler)).encode(), digest_size=16)
        for item in self.items:
            found.update(repr(item).encode())
        return found.hexdigest()

    def read(self, sample_ids: range) -> dict[str, Tensor]:
        """The micro batch of these samples; the unfilled end of a sample is one more document, without labels."""
        shape = (len(sample_ids), self.seq_length)
        tokens, labels = np.full(shape, self.filler, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        lengths = np.zeros((len(sample_ids), self.most), dtype=np.int64)
        for row, number in enumerate(sample_ids):
            place, documents = 0, [one for item in self._members(number) for one in self.items[item]]
            for index, (own, own_labels) in enumerate(documents):
                part = slice(place, place + len(own))
                tokens[row, part], labels[row, part], positions[row, part] = own, own_labels, np.arange(len(own))
                lengths[row, index] = len(own)
                place += len(own)
            rest = self.seq_length - place
            if rest:
                lengths[row, len(documents)] = rest
                positions[row, place:] = np.arange(rest)
        entries = {"tokens": tokens, "labels": labels, "positions": positions, "document_lengths": lengths}
        batch = {name: torch.from_numpy(entry) for name, entry in entries.items()}
        return {**batch, "sample_ids": torch.tensor(list(sample_ids))}

    def _members(self, number: int) -> list[int]:
        """The items of a sample."""
        epoch, index = divmod(number, self.count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.count)
        return self.packed[self._order[index]]
