"""Windows of a stream of bytes, in another order in every epoch. B samples, S sequence length."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from mplug import UsageError


class Windows:
    """Window n of a stream: the S bytes from n * S on, and for the last label the byte after them."""

    def __init__(self, stream: bytes, seq_length: int, seed: int) -> None:
        self.count = (len(stream) - 1) // seq_length
        if self.count < 1:
            raise UsageError(
                f"the column has {len(stream)} bytes; a sample of trainer.seq_length={seq_length} needs one more"
            )
        self.stream, self.seq_length = np.frombuffer(stream, dtype=np.uint8), seq_length
        self._order = cache(lambda epoch: np.random.default_rng([seed, epoch]).permutation(self.count))

    def read(self, sample_ids: range) -> dict[str, Tensor]:
        """The micro batch of these samples."""
        windows = [self._order(number // self.count)[number % self.count] for number in sample_ids]
        places = np.array(windows)[:, None] * self.seq_length + np.arange(self.seq_length + 1)
        tokens = torch.from_numpy(self.stream[places].astype(np.int64))  # [B, S + 1]
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "positions": torch.arange(self.seq_length)[None],
            "sample_ids": torch.tensor(list(sample_ids)),
        }
