"""Samples of a stream of tokens, in a seeded order: windows of S + 1 tokens, the inputs and the last label."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mplug_text.corpus import enough_for_windows

Tokens = NDArray[np.uint8] | NDArray[np.int32]


class Windows:
    """Samples by their number in the global order: every epoch reads each window of the stream once, in its own order.

    Each epoch has its own offset of the first window, so that window borders move.
    """

    def __init__(self, stream: Tokens, seq_length: int, seed: int) -> None:
        self.count = (len(stream) - 1) // seq_length - 1
        assert enough_for_windows(len(stream), seq_length)
        self.stream, self.seq_length, self.seed = stream, seq_length, seed
        self._epoch = -1
        self._starts = np.empty(0, dtype=np.int64)

    def read(self, sample_ids: range) -> dict[str, Tensor]:
        """The micro batch of these samples."""
        return micro_batch([self._window(*divmod(number, self.count)) for number in sample_ids], sample_ids)

    def _window(self, epoch: int, index: int) -> Tokens:
        if epoch != self._epoch:
            random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            offset = int(random.integers(self.seq_length))
            self._starts = offset + random.permutation(self.count) * self.seq_length
            self._epoch = epoch
        start = self._starts[index]
        return self.stream[start : start + self.seq_length + 1]


class RepeatedWindows:
    """Samples of a stream that is too short for `Windows`, by their number in the global order.

    The stream is repeated without end: an epoch has every document once, in its own order. The token `end` ends a
    document; None: the stream is one document. The epochs are concatenated, and the result is cut every S tokens, from
    an offset that follows from the seed. So a sample may contain the border of two epochs, or several epochs.
    """

    count = None
    """An epoch has no whole number of samples."""

    def __init__(self, stream: Tokens, seq_length: int, seed: int, end: int | None = 0) -> None:
        assert len(stream)
        ends = np.flatnonzero(stream == end) + 1 if end is not None else np.empty(0, dtype=np.int64)
        self.documents = [part for part in np.split(stream, ends) if len(part)]
        self.length, self.seq_length, self.seed = len(stream), seq_length, seed
        self.offset = int(np.random.Generator(np.random.PCG64([seed])).integers(len(stream)))

    def read(self, sample_ids: range) -> dict[str, Tensor]:
        """The micro batch of these samples."""
        return micro_batch([self._window(number) for number in sample_ids], sample_ids)

    def _window(self, number: int) -> Tokens:
        start = self.offset + number * self.seq_length
        stop = start + self.seq_length + 1
        first, last = start // self.length, (stop - 1) // self.length
        epochs = np.concatenate([self._epoch(epoch) for epoch in range(first, last + 1)])
        return epochs[start - first * self.length : stop - first * self.length]

    def _epoch(self, epoch: int) -> Tokens:
        random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        return np.concatenate([self.documents[place] for place in random.permutation(len(self.documents))])


def micro_batch(rows: list[Tokens], sample_ids: range) -> dict[str, Tensor]:
    """The micro batch of samples whose windows are `rows`."""
    windows = torch.from_numpy(np.stack(rows).astype(np.int64))  # [B, S + 1]
    return {
        "tokens": windows[:, :-1].contiguous(),
        "labels": windows[:, 1:].contiguous(),
        "positions": torch.arange(windows.shape[1] - 1)[None],
        "sample_ids": torch.tensor(list(sample_ids)),
    }
