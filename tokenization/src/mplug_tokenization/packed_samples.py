"""Samples of packed conversations. B samples of a micro batch, S sequence length, M documents of a sample."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mplug_tokenization.packing import best_fit_decreasing
from mplug_tokenization.vocabulary import Encoded

IGNORED = -100
"""The label of a position without a target."""


class DocumentStore(Protocol):
    """Encoded conversations that can be read by their number."""

    lengths: Sequence[int] | NDArray[np.int64]
    """The number of tokens of each."""

    def read(self, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(tokens, labels) of a conversation; a label is the next token, or IGNORED."""

    @property
    def fingerprint(self) -> bytes:
        """A digest of the tokens and labels."""


class Documents:
    """Tokens and labels of all conversations, concatenated in two arrays: 12 bytes per token."""

    def __init__(self, documents: Iterable[tuple[NDArray[np.int32], NDArray[np.int64]]]) -> None:
        pairs = list(documents)
        self.lengths = [len(tokens) for tokens, _ in pairs]
        self.ends = np.cumsum([0, *self.lengths])
        self.tokens = np.concatenate([np.empty(0, np.int32), *(tokens for tokens, _ in pairs)])
        self.labels = np.concatenate([np.empty(0, np.int64), *(labels for _, labels in pairs)])

    def read(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(tokens, labels) of a conversation."""
        source = slice(self.ends[number], self.ends[number + 1])
        return self.tokens[source], self.labels[source]

    @property
    def fingerprint(self) -> bytes:
        """A digest of all tokens and labels, and of the ends of the conversations."""
        found = blake2b(digest_size=16)
        for array in (self.ends, self.tokens, self.labels):
            found.update(array.data)
        return found.digest()


def document(encoded: Encoded, length: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """(tokens, labels) of a conversation, at most `length`; a label is the next token if it belongs to an answer."""
    tokens = np.asarray(encoded.tokens, dtype=np.int32)
    labels = np.full(len(tokens), IGNORED, dtype=np.int64)
    labels[:-1] = np.where(encoded.answers[1:], tokens[1:], IGNORED)
    return tokens[:length], labels[:length]


class PackedSamples:
    """Samples by their number in the global order: every epoch reads each packed sample once, in its own order.

    The packing is the same in every epoch. So all epochs have the same number of samples, and any sample can be read
    without the preceding ones. `key` is the key of the order: the seed, and what else distinguishes this set.
    """

    def __init__(self, documents: DocumentStore, seq_length: int, most: int, filler: int, key: Sequence[int]) -> None:
        self.documents, self.seq_length, self.most, self.filler, self.key = documents, seq_length, most, filler, key
        own = [*map(int, documents.lengths)]
        self.packed = best_fit_decreasing(own, seq_length, most - 1)  # one is reserved for the filler
        self.count = len(self.packed)
        self._orders: dict[int, NDArray[np.int64]] = {}

    @property
    def fingerprint(self) -> str:
        """A hash of the conversations' tokens and labels, and of the settings of the packing."""
        found = blake2b(repr((self.seq_length, self.most, self.filler)).encode(), digest_size=16)
        found.update(self.documents.fingerprint)
        return found.hexdigest()

    @property
    def filled(self) -> float:
        """The share of positions that conversations fill."""
        return int(sum(self.documents.lengths)) / (self.count * self.seq_length)

    def documents_of(self, number: int) -> list[int]:
        """The lengths of the documents of a sample; the unfilled end is one more."""
        lengths = [int(self.documents.lengths[one]) for one in self._packed(*divmod(number, self.count))]
        rest = self.seq_length - sum(lengths)
        return [*lengths, rest] if rest else lengths

    def read(self, sample_ids: Sequence[int]) -> dict[str, Tensor]:
        """The micro batch of these samples; the unfilled end of a sample is one more document, without targets."""
        shape = (len(sample_ids), self.seq_length)
        tokens, labels = np.full(shape, self.filler, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        lengths = np.zeros((len(sample_ids), self.most), dtype=np.int64)
        for row, number in enumerate(sample_ids):
            self._fill(
                self._packed(*divmod(number, self.count)), tokens[row], labels[row], positions[row], lengths[row]
            )
        entries: dict[str, NDArray[Any]] = {"tokens": tokens, "labels": labels, "positions": positions}
        batch = {name: torch.from_numpy(entry) for name, entry in entries.items()}
        return {**batch, "sample_ids": torch.tensor(list(sample_ids)), "document_lengths": torch.from_numpy(lengths)}

    def _fill(
        self,
        members: list[int],
        tokens: NDArray[np.int64],
        labels: NDArray[np.int64],
        positions: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        place = 0
        for number, member in enumerate(members):
            own_tokens, own_labels = self.documents.read(member)
            length = lengths[number] = len(own_tokens)
            tokens[place : place + length] = own_tokens
            labels[place : place + length] = own_labels
            positions[place : place + length] = np.arange(length)
            place += length
        if place < self.seq_length:
            lengths[len(members)] = self.seq_length - place
            positions[place:] = np.arange(self.seq_length - place)

    def _packed(self, epoch: int, index: int) -> list[int]:
        if epoch not in self._orders:
            self._orders = {
                one: order for one, order in self._orders.items() if one >= epoch - 1
            }  # a step may span two
            self._orders[epoch] = np.random.Generator(np.random.PCG64([*self.key, epoch])).permutation(self.count)
        return self.packed[self._orders[epoch][index]]
