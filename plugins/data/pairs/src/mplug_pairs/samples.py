"""Samples of pairs by their number in the global order. B samples, S tokens of the decoder, T of the encoder."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from mplug import IGNORED, MicroBatch
from mplug_pairs.reading import Encoded
from mplug_tokenization.encoder_texts import entries_of_texts


class Samples:
    """Every epoch has each pair once, in an order of its own that follows from the seed."""

    def __init__(self, pairs: Sequence[Encoded], seed: int, input_length: int, target_length: int, start: int) -> None:
        self.pairs, self.seed, self.start = pairs, seed, start
        self.input_length, self.target_length = input_length, target_length
        self.count = len(pairs)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """A digest of all tokens and lengths."""
        found = blake2b(repr((self.input_length, self.target_length, self.start)).encode(), digest_size=16)
        for pair in self.pairs:
            found.update(repr(tuple(pair)).encode())
        return found.hexdigest()

    def read(self, sample_ids: range) -> MicroBatch:
        """The micro batch of these samples."""
        pairs = [self._pair(*divmod(number, self.count)) for number in sample_ids]
        labels = torch.full((len(pairs), self.target_length), IGNORED)
        tokens = torch.full_like(labels, self.start)
        for row, pair in enumerate(pairs):
            target = torch.tensor(pair.target)
            labels[row, : len(target)] = target
            tokens[row, 1 : len(target)] = target[:-1]
        ids = torch.tensor(list(sample_ids))
        texts = [torch.tensor(pair.input) for pair in pairs]
        return {
            "tokens": tokens,
            "labels": labels,
            "positions": torch.arange(self.target_length)[None],
            "sample_ids": ids,
            **entries_of_texts(texts, ids, self.input_length),
        }

    def _pair(self, epoch: int, index: int) -> Encoded:
        if epoch != self._epoch:
            random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._order, self._epoch = random.permutation(self.count), epoch
        return self.pairs[self._order[index]]
