"""Windows of a byte stream in a seeded order."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Windows:
    """Samples by their number in the global order: every epoch reads each window of the stream once, in its own order.

    Each epoch has its own offset of the first window, so that window borders move.
    """

    def __init__(self, stream: NDArray[np.uint8], seq_length: int, seed: int) -> None:
        self.count = (len(stream) - 1) // seq_length - 1
        if self.count < 1:
            raise ValueError(
                f"has {len(stream)} bytes, too few for samples of trainer.seq_length={seq_length}; "
                f"it needs at least {2 * seq_length + 1}"
            )
        self.stream, self.seq_length, self.seed = stream, seq_length, seed
        self._epoch = -1
        self._starts = np.empty(0, dtype=np.int64)

    def read(self, sample_ids: range) -> dict[str, Tensor]:
        """The micro batch of these samples."""
        rows = np.stack([self._window(*divmod(number, self.count)) for number in sample_ids])
        windows = torch.from_numpy(rows.astype(np.int64))  # [B, S + 1]
        return {
            "tokens": windows[:, :-1].contiguous(),
            "labels": windows[:, 1:].contiguous(),
            "positions": torch.arange(self.seq_length)[None],
            "sample_ids": torch.tensor(list(sample_ids)),
        }

    def _window(self, epoch: int, index: int) -> NDArray[np.uint8]:
        if epoch != self._epoch:
            random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            offset = int(random.integers(self.seq_length))
            self._starts = offset + random.permutation(self.count) * self.seq_length
            self._epoch = epoch
        start = self._starts[index]
        return self.stream[start : start + self.seq_length + 1]
