"""Packed documents as flash-linear-attention receives them: all rows concatenated, and the start of each document.

B batch, S positions, M documents of a sample, N documents of all samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True, eq=False)
class Sequences:
    """The documents of a batch. `begins` [N + 1] are their starts in the concatenated rows, and the number of rows.

    `firsts` and `lasts` [B] are the numbers of each sample's first and last document.
    """

    begins: Tensor
    firsts: Tensor
    lasts: Tensor

    @property
    def count(self) -> int:
        """N."""
        return len(self.begins) - 1

    def spread(self, state: Tensor | None) -> Tensor | None:
        """Start states of samples [B, ...] -> start states of documents [N, ...], zeros but for the first ones."""
        if state is None:
            return None
        return state.new_zeros(self.count, *state.shape[1:]).index_copy(0, self.firsts, state)

    def spread_last(self, gradient: Tensor | None) -> Tensor | None:
        """Gradients of the samples' end states [B, ...] -> those of the documents' [N, ...]."""
        if gradient is None:
            return None
        return gradient.new_zeros(self.count, *gradient.shape[1:]).index_copy(0, self.lasts, gradient)


_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Tensor of lengths -> (its version, its documents): all layers and both passes of a micro batch share the tensor."""


def sequences(lengths: Tensor) -> Sequences:
    """The documents of lengths [B, M], padded with zeros. The first call for a tensor waits for the device."""
    known = _KNOWN.get(lengths)
    if known is not None and known[0] == lengths._version:
        found: Sequences = known[1]
        return found
    rows = [[length for length in row if length] for row in lengths.tolist()]
    begins = [0]
    for length in (length for row in rows for length in row):
        begins.append(begins[-1] + length)
    lasts = torch.tensor([len(row) for row in rows]).cumsum(0) - 1
    firsts = torch.cat((lasts.new_zeros(1), lasts[:-1] + 1))
    made = Sequences(*(x.to(lengths.device) for x in (torch.tensor(begins), firsts, lasts)))
    _KNOWN[lengths] = lengths._version, made
    return made


def concatenated(x: Tensor) -> Tensor:
    """[B, S, ...] -> [1, B S, ...]."""
    return x.flatten(0, 1)[None]
