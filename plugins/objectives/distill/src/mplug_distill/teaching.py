"""The loss of a student beside its teacher. B batch, S sequence of this process, R ranks of sequence parallelism."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mplug import IGNORED
from mplug_distill.config import DistillConfig
from mplug_nn import Divergence, Objective

FIGURES = ("distill/divergence", "distill/cross_entropy")


class DistillLoss(Objective):
    """The sum over targets of (1 - w) divergence + w cross-entropy, and the number of targets.

    The logits of both models exist for a chunk of positions at a time; backward computes them again.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()
    teacher: Any

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(figures=FIGURES[: 2 if config.cross_entropy_weight else 1])
        self.share, self.chunk = config.cross_entropy_weight, config.chunk
        self.form = Divergence(config.divergence, config.beta, config.temperature)

    def forward(
        self,
        hidden: Tensor,
        project: Callable[[Tensor], Tensor],
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        beside: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """hidden and the teacher's `beside` [B, S / R, D], labels and weights [B, S] -> (loss, number of targets)."""
        taught, project_taught = self.teacher.head.vectors(beside)
        ranks = labels.shape[1] // hidden.shape[1]
        size = max(self.chunk // ranks, 1)
        of_tokens = [tiles(one, ranks, size) for one in (labels, weights) if one is not None]
        total = hidden.new_zeros(())
        figures: list[Tensor] = []  # a compiler does not trace list[Tensor]()
        for own, other, *parts in zip(hidden.split(size, 1), taught.split(size, 1), *of_tokens, strict=True):
            arguments = (own, project, other, project_taught, *parts)
            found = self._loss(*arguments) if own is hidden or not torch.is_grad_enabled() else self._again(arguments)
            total = total + found[0]
            figures.append(found[1])
        sums = torch.stack(figures).sum(dim=0).unbind()
        named = zip(self.figures, sums, strict=False)
        self.report(hidden, labels, **{name.replace("/", "_"): value for name, value in named})
        return total, (labels != IGNORED).sum()

    def _again(self, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = checkpoint(self._loss, *arguments, use_reentrant=False, preserve_rng_state=False)
        return found

    def _loss(
        self,
        hidden: Tensor,
        project: Callable[[Tensor], Tensor],
        taught: Tensor,
        project_taught: Callable[[Tensor], Tensor],
        labels: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(the sum of the losses [], the sums of divergence and cross-entropy [2]) of some positions."""
        each = self.divergence(hidden, project, taught, project_taught, labels, self.form)  # [B, n]
        factor = 1.0 if weights is None else weights
        diverging = (each * factor).sum()
        if not self.share:
            return diverging, torch.stack((diverging.detach(), torch.zeros_like(diverging)))
        entropy = -(self.log_probabilities(hidden, project, labels) * factor).sum()
        loss = (1 - self.share) * diverging + self.share * entropy
        return loss, torch.stack((diverging.detach(), entropy.detach()))


def tiles(of_tokens: Tensor, ranks: int, size: int) -> list[Tensor]:
    """[B, R n] -> for each tile of `size` hidden vectors of a rank, the positions that all ranks have of it."""
    parts = of_tokens.unflatten(1, (ranks, -1)).split(size, dim=2)
    return [part.flatten(1) for part in parts]
