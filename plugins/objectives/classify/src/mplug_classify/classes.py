"""The loss of classes. B batch, S positions of this process, D embed, C classes."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mplug import IGNORED
from mplug_nn import ScoredObjective
from mplug_nn.loss import token_losses


class ClassLoss(ScoredObjective):
    """The sum of the cross-entropies of classes at positions with a label, and the number of labels."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, dim: int, labels: Sequence[str], init_std: float) -> None:
        super().__init__(dim, labels, init_std, figures=("accuracy",))

    def forward(
        self,
        hidden: Tensor,
        project: Callable[[Tensor], Tensor],
        labels: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [B, S, D], labels and weights [B, S] -> (sum of the losses in nats, number of labels)."""
        scores, flat = self.scores(hidden).flatten(0, 1), labels.flatten()  # [B S, C], [B S]
        counted = flat != IGNORED
        factor = counted.to(scores.dtype) if weights is None else counted * weights.flatten()
        losses = token_losses(scores, torch.where(counted, flat, 0))
        right = (scores.argmax(dim=-1) == flat) & counted
        self.report(hidden, labels, accuracy=right.sum())
        return (losses * factor).sum(), counted.sum()
