"""Look-up and cross-entropy of a vocabulary split over ranks. V vocabulary, R ranks, v = ceil(V/R) rows per rank.

The tables of the last ranks are padded to v rows. Padding rows affect neither the look-up nor the loss.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

import mplug_ops as ops
from mplug_nn import Divergence
from mplug_nn.divergence import token_divergences
from mplug_nn.embedding import lookup
from mplug_nn.loss import IGNORED, factors, loss_sum, token_losses
from mplug_nn.top_divergence import token_top_divergences
from mplug_nn.top_probabilities import Parts, token_top_probabilities


class VocabularyParallel:
    """The suppliers of a vocabulary of `size` unpadded rows, split over `group`; `size` is None if it is not split."""

    def __init__(self, group: ops.Group, size: int | None) -> None:
        self.group, self.size = group, size
        self.rank = group.rank() if group is not None else 0

    def lookup(self, indices: Tensor, weight: Tensor) -> Tensor:
        """indices [B, S] in the whole vocabulary, weight [v, D] -> this rank's term [B, S, D] of the look-up.

        Rows of other ranks are zeros; the caller sums the terms over the ranks.
        """
        local, in_shard = self._localized(indices, weight.shape[0])
        return lookup(local, weight) * in_shard[..., None]

    def cross_entropy(
        self, hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """hidden [B, S, D], labels and weights [B, S] -> (loss sum, number of targets).

        `project` gives own logits [B, S, v].
        """
        logits, own = self._own(project(hidden), labels)
        counted = labels.flatten() != IGNORED
        return loss_sum(logits, own, factors(counted, weights), self._merge), counted.sum()

    def log_probabilities(self, hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
        """hidden [B, S, D], labels [B, S] -> the log-probabilities of the labels [B, S]; 0 without a target."""
        losses = token_losses(*self._own(project(hidden), labels), self._merge)
        return torch.where(labels == IGNORED, 0.0, -losses.view_as(labels))

    def divergence(
        self,
        hidden: Tensor,
        project: Callable[[Tensor], Tensor],
        taught: Tensor,
        project_taught: Callable[[Tensor], Tensor],
        labels: Tensor,
        form: Divergence,
    ) -> Tensor:
        """Both models' hidden vectors [B, S, D], labels [B, S] -> the divergences of positions with a target [B, S]."""
        logits, of_teacher = (self._own(one, labels)[0] for one in (project(hidden), project_taught(taught)))
        found = token_divergences(logits, of_teacher, form, self._merge)
        return torch.where(labels == IGNORED, 0.0, found.view_as(labels))

    def top_divergence(
        self, hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor, tokens: Tensor, taught: Tensor
    ) -> Tensor:
        """hidden [B, S, D], labels [B, S], tokens [B, S, k], taught [B, S, k + 1] -> the divergences of targets."""
        logits, _ = self._own(project(hidden), labels)
        local, in_shard = self._localized(tokens.flatten(0, -2), logits.shape[1])
        columns = local.masked_fill(~in_shard, -1)
        found = token_top_divergences(logits, columns, taught.flatten(0, -2), self._merge)
        return torch.where(labels == IGNORED, 0.0, found.view_as(labels))

    def top_probabilities(self, hidden: Tensor, project: Callable[[Tensor], Tensor], k: int) -> tuple[Tensor, Tensor]:
        """hidden [B, S, D] -> (the k most probable tokens [B, S, k], log-probabilities [B, S, k + 1])."""
        logits = project(hidden)
        own = self._without_padding(logits.flatten(0, -2))
        parts = Parts(lambda values: ops.all_gather(values, self.group, -1), self._merge, self.rank * own.shape[1])
        tokens, logs = token_top_probabilities(own, k, parts)
        return tokens.unflatten(0, logits.shape[:-1]), logs.unflatten(0, logits.shape[:-1])

    def _own(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's logits [B S, v] without those of padding, and the labels [B S]; -1: not among these v."""
        logits, flat = logits.flatten(0, -2), labels.flatten()
        local, in_shard = self._localized(flat, logits.shape[1])
        return self._without_padding(logits), local.masked_fill(~in_shard, -1)

    def _without_padding(self, logits: Tensor) -> Tensor:
        """This rank's logits [N, v]; those of padding are minus infinity."""
        width, size = logits.shape[1], self.size or 0
        if self.group is not None and size < self.group.size() * width:
            # Mask on every rank, padded or not: identical compiled graphs keep one order of collectives on all ranks.
            padding = torch.arange(width, device=logits.device) >= size - self.rank * width
            logits = logits.masked_fill(padding, float("-inf"))
        return logits

    def _merge(self, values: Tensor, op: Literal["SUM", "MAX"]) -> Tensor:
        """All-reduce; three per loss: maximum, sum of exponentials, the label's logit (arXiv 1909.08053, section 3)."""
        return ops.all_reduce(values, self.group, op)

    def _localized(self, indices: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """(row of each index in this rank's table or 0, whether the table holds the index)."""
        local = indices - self.rank * width
        in_shard = (local >= 0) & (local < width)
        return local.masked_fill(~in_shard, 0), in_shard
