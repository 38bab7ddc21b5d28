"""Windows of a token stream, and a permutation of them for every epoch.

`B` samples of a micro batch, `S` sequence length.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Windows:
    """Window n of a stream: the S tokens from n * S on, and for the last label the token after them."""

    def __init__(self, stream: NDArray[np.uint8], seq_length: int) -> None:
        self.count = (len(stream) - 1) // seq_length
        if self.count < 1:
            raise ValueError(f"has {len(stream)} tokens; a sample of trainer.seq_length={seq_length} needs one more")
        self.stream, self.seq_length = stream, seq_length

    def read(self, sample_ids: range, windows: Sequence[int]) -> dict[str, Tensor]:
        """The micro batch of these windows, which are the samples of these numbers."""
        starts = np.asarray(windows)[:, None] * self.seq_length
        tokens = torch.from_numpy(self.stream[starts + np.arange(self.seq_length + 1)].astype(np.int64))  # [B, S + 1]
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "positions": torch.arange(self.seq_length)[None],
            "sample_ids": torch.tensor(list(sample_ids)),
        }


class Permutations:
    """Which window a sample is: an epoch takes each of `count` windows once, in an order of its own."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def window(self, sample: int) -> int:
        """The window of a sample of the global order."""
        epoch, place = divmod(sample, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.count)
        return int(self._order[place])
