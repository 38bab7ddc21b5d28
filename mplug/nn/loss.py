"""The language-model loss: a sum with a count, so that one global token count divides once."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""The label of a position that has no target."""


def cross_entropy(hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """The default of the slot `Loss.cross_entropy`.

    hidden [B, S, D], `project` to logits [B, S, V] (a `Linear`), labels [B, S] -> (sum of the losses in nats, at least
    fp32; number of targets, int64). A supplier may project in chunks, so that the logits never exist at once.
    """
    logits = project(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (labels != IGNORED).sum()


class Loss(nn.Module):
    """Next-token cross-entropy."""

    SLOTS = ("Loss.cross_entropy",)

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = cross_entropy

    def forward(self, hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [B, S, D], labels [B, S] -> (loss sum, number of targets)."""
        return self.cross_entropy(hidden, project, labels)
