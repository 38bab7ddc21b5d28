"""A vocabulary divided over ranks: look-up and cross-entropy. V vocabulary, R ranks, v = ceil(V/R) rows a rank.

The last tables are padded to v rows; padding takes no part in anything.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mplug import ops
from mplug.nn.loss import IGNORED


class VocabularyParallel:
    """The suppliers of a vocabulary of `size` rows (None: it is not divided) over a group."""

    def __init__(self, group: ops.Group, size: int | None) -> None:
        self.group, self.size = group, size
        self.rank = group.rank() if group is not None else 0

    def lookup(self, indices: Tensor, weight: Tensor) -> Tensor:
        """indices [B, S] of the whole vocabulary, weight [v, D] -> [B, S, D]; the look-up is the sum over the ranks."""
        local, mine = self._localized(indices, weight.shape[0])
        return F.embedding(local, weight) * mine[..., None]

    def cross_entropy(
        self, hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden [B, S, D], `project` to own logits [B, S, v], labels [B, S] -> (loss sum, number of targets)."""
        logits, flat = project(hidden).float().flatten(0, -2), labels.flatten()
        width = logits.shape[-1]
        local, mine = self._localized(flat, width)
        padding = torch.arange(width, device=logits.device) >= (self.size or 0) - self.rank * width
        counted = flat != IGNORED
        losses: Tensor = _CrossEntropy.apply(logits.masked_fill(padding, float("-inf")), local, mine, self.group)
        return (losses * counted).sum(), counted.sum()

    def _localized(self, indices: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Rows of this rank's table, and which of the indices are in it."""
        local = indices - self.rank * width
        mine = (local >= 0) & (local < width)
        return local.masked_fill(~mine, 0), mine


class _CrossEntropy(torch.autograd.Function):
    """loss_n = log sum_v exp(z_nv) - z_n,label, with z divided over ranks along v; grad_z = softmax(z) - onehot(label).

    Three small all-reduces (maximum, sum of exponentials, the label's logit): arXiv 1909.08053, section 3.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, local: Tensor, mine: Tensor, group: ops.Group) -> Tensor:
        highest = logits.amax(dim=-1)
        if group is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        exponentials = (logits - highest[:, None]).exp()
        label = torch.where(mine, logits.gather(1, local[:, None])[:, 0], 0.0)
        total, label = ops.all_reduce(exponentials.sum(dim=-1), group), ops.all_reduce(label, group)
        ctx.save_for_backward(exponentials / total[:, None], local, mine)
        return total.log() + highest - label

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, mine = ctx.saved_tensors
        grad_logits = probabilities.scatter_add(1, local[:, None], -mine[:, None].to(probabilities.dtype))
        return grad_logits * grad[:, None], None, None, None
