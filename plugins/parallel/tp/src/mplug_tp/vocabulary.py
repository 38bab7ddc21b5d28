"""A vocabulary divided over ranks: look-up and cross-entropy. V vocabulary, R ranks, v = ceil(V/R) rows a rank.

The last tables are padded to v rows; padding takes no part in anything.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from mplug import ops
from mplug.nn.embedding import lookup
from mplug.nn.loss import IGNORED, loss_sum


class VocabularyParallel:
    """The suppliers of a vocabulary of `size` rows (None: it is not divided) over a group."""

    def __init__(self, group: ops.Group, size: int | None) -> None:
        self.group, self.size = group, size
        self.rank = group.rank() if group is not None else 0

    def lookup(self, indices: Tensor, weight: Tensor) -> Tensor:
        """indices [B, S] of the whole vocabulary, weight [v, D] -> [B, S, D]; the look-up is the sum over the ranks."""
        local, mine = self._localized(indices, weight.shape[0])
        return lookup(local, weight) * mine[..., None]

    def cross_entropy(
        self, hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden [B, S, D], `project` to own logits [B, S, v], labels [B, S] -> (loss sum, number of targets)."""
        logits, flat = project(hidden).flatten(0, -2), labels.flatten()
        local, mine = self._localized(flat, logits.shape[1])
        counted, width, size = flat != IGNORED, logits.shape[1], self.size or 0
        if self.group is not None and size < self.group.size() * width:
            # On every rank: ranks must compile graphs that are alike, to have one order of collectives.
            padding = torch.arange(width, device=logits.device) >= size - self.rank * width
            logits = logits.masked_fill(padding, float("-inf"))
        return loss_sum(logits, local.masked_fill(~mine, -1), counted, self._merge), counted.sum()

    def _merge(self, values: Tensor, op: Literal["SUM", "MAX"]) -> Tensor:
        """Three of them a loss: maximum, sum of exponentials, the label's logit (arXiv 1909.08053, section 3)."""
        return ops.all_reduce(values, self.group, op)

    def _localized(self, indices: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Rows of this rank's table, and which of the indices are in it."""
        local = indices - self.rank * width
        mine = (local >= 0) & (local < width)
        return local.masked_fill(~mine, 0), mine
