"""Sequences of equal length that together predict every token of some documents once.

`S` is the length of a sequence. Its `S` inputs predict the tokens that follow them.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from mplug import IGNORED

if TYPE_CHECKING:
    from mplug import MicroBatch

PADDING = 0
"""The token behind the end of a document. No position before it sees it, and it has no loss."""


class Windows:
    """The windows of documents, in their order. A window begins `stride` tokens after the one before.

    The first window of a document predicts `S` tokens, and each later one those that the windows before do not predict:
    the last `stride` ones. So a token has at least `S - stride` tokens of context, if the document has as many.
    """

    def __init__(self, documents: Sequence[Sequence[int]], seq_length: int, stride: int) -> None:
        self.documents, self.length, self.stride = documents, seq_length, stride
        counts = [self._windows_of(len(one) - 1) for one in documents]
        self._ends = list(accumulate(counts))
        self.count = self._ends[-1]

    def _windows_of(self, targets: int) -> int:
        return 0 if targets < 1 else 1 + max(0, -(-(targets - self.length) // self.stride))

    def read(self, numbers: range) -> "MicroBatch":
        """The micro batch of windows. Numbers behind the last window repeat the windows."""
        rows = [self._window(number % self.count) for number in numbers]
        tokens, labels = (torch.tensor(part) for part in zip(*rows, strict=True))
        return {
            "tokens": tokens,
            "labels": labels,
            "positions": torch.arange(self.length)[None],
            "sample_ids": torch.tensor(list(numbers)),
        }

    def _window(self, number: int) -> tuple[list[int], list[int]]:
        which = bisect_right(self._ends, number)
        of_document = number - (self._ends[which - 1] if which else 0)
        begin = of_document * self.stride
        part = list(self.documents[which][begin : begin + self.length + 1])
        known = self.length - self.stride if of_document else 0
        labels = [IGNORED] * known + part[1 + known :]
        missing = self.length + 1 - len(part)
        return part[:-1] + [PADDING] * missing, labels + [IGNORED] * missing

    def targets(self) -> Iterator[int]:
        """All tokens that the windows predict, in order."""
        for number in range(self.count):
            yield from (label for label in self._window(number)[1] if label != IGNORED)
