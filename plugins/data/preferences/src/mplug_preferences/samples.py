"""Samples of packed pairs. B samples of a micro batch, S sequence length, M documents of a sample."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mplug import DOCUMENTS, IGNORED, SEQUENCES
from mplug_preferences.encoding import Pair
from mplug_tokenization.packing import best_fit_decreasing


class PairedSamples:
    """Samples by their number in the global order: every epoch reads each packed sample once, in its own order.

    The documents of a sample are the chosen and the rejected answer of each of its pairs in turn, and the filler.
    """

    def __init__(
        self, pairs: Iterable[Pair], seq_length: int, most: int, filler: int, seed: int, numbers: Sequence[str]
    ) -> None:
        self.pairs, self.seq_length, self.most, self.filler, self.seed = list(pairs), seq_length, most, filler, seed
        self.numbers = tuple(numbers)
        self.packed = best_fit_decreasing([pair.length for pair in self.pairs], seq_length, most)
        self.count = len(self.packed)
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """A hash of the pairs, and of the settings of the packing."""
        found = blake2b(repr((self.seq_length, self.most, self.filler)).encode(), digest_size=16)
        for pair in self.pairs:
            for one in (pair.chosen, pair.rejected):
                found.update(len(one.tokens).to_bytes(8, "little"))
                found.update(np.ascontiguousarray(one.tokens).data)
                found.update(np.ascontiguousarray(one.labels).data)
            found.update(repr(sorted(pair.numbers.items())).encode())
        return found.hexdigest()

    @property
    def filled(self) -> float:
        """The share of positions that pairs fill."""
        return sum(pair.length for pair in self.pairs) / (self.count * self.seq_length)

    def read(self, sample_ids: range) -> dict[str, Tensor]:
        """The micro batch of these samples; the unfilled end of a sample is one more document, without targets."""
        shape = (len(sample_ids), self.seq_length)
        batch: dict[str, NDArray[np.int64] | NDArray[np.float32]] = {
            "tokens": np.full(shape, self.filler, dtype=np.int64),
            "labels": np.full(shape, IGNORED, dtype=np.int64),
            "positions": np.zeros(shape, dtype=np.int64),
            SEQUENCES: np.full(shape, -1, dtype=np.int64),
            DOCUMENTS: np.zeros((len(sample_ids), 2 * self.most + 1), dtype=np.int64),
        }
        batch |= {name: np.zeros(shape, dtype=np.float32) for name in self.numbers}
        for row, number in enumerate(sample_ids):
            members = [self.pairs[one] for one in self._packed(*divmod(number, self.count))]
            self._fill(members, {name: entry[row] for name, entry in batch.items()})
        found = {name: torch.from_numpy(entry) for name, entry in batch.items()}
        return {**found, "sample_ids": torch.tensor(list(sample_ids))}

    def _fill(self, members: list[Pair], row: dict[str, NDArray[np.int64] | NDArray[np.float32]]) -> None:
        place = 0
        for pair, member in enumerate(members):
            for which, one in enumerate((member.chosen, member.rejected)):
                length, document = len(one.tokens), 2 * pair + which
                part = slice(place, place + length)
                row["tokens"][part], row["labels"][part] = one.tokens, one.labels
                row["positions"][part], row[SEQUENCES][part] = np.arange(length), document
                row[DOCUMENTS][document] = length
                for name in self.numbers:
                    row[name][place] = member.numbers[name][which]
                place += length
        if place < self.seq_length:
            row[DOCUMENTS][2 * len(members)] = self.seq_length - place
            row["positions"][place:] = np.arange(self.seq_length - place)

    def _packed(self, epoch: int, index: int) -> list[int]:
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.count)
        return self.packed[self._order[index]]
