"""The loss of a student beside its teacher, or its largest probabilities.

B batch, S sequence of this process, R ranks of sequence parallelism.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mplug import IGNORED, TOP_TAUGHT, TOP_TOKENS
from mplug_distill.config import DistillConfig
from mplug_nn import Divergence, Objective

FIGURES = ("distill/divergence", "distill/cross_entropy")


class Chunked(Objective):
    """The sum over targets of (1 - w) divergence + w cross-entropy, and the number of targets.

    The logits exist for a chunk of positions at a time; backward computes them again.
    """

    def __init__(self, config: DistillConfig, entries: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> None:
        super().__init__(entries, FIGURES[: 2 if config.cross_entropy_weight else 1])
        self.share, self.chunk = config.cross_entropy_weight, config.chunk

    def summed_losses(
        self,
        diverging: Callable[..., Tensor],
        hidden: Tensor,
        project: Callable[[Tensor], Tensor],
        labels: Tensor,
        weights: Tensor | None,
        *,
        vectors: Sequence[Tensor] = (),
        of_tokens: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """hidden [B, S / R, D], labels and weights [B, S] -> (loss, number of targets).

        `diverging(hidden, project, labels, *vectors, *of_tokens)` returns the divergences [B, n] of a chunk, to which
        the `vectors` [B, S / R, ...] and the values `of_tokens` [B, S, ...] are cut.
        """
        ranks = labels.shape[1] // hidden.shape[1]
        size = max(self.chunk // ranks, 1)
        own = hidden.split(size, 1)
        factors = [None] * len(own) if weights is None else tiles(weights, ranks, size)
        parts = [*(one.split(size, 1) for one in vectors), *(tiles(one, ranks, size) for one in of_tokens)]
        total = hidden.new_zeros(())
        figures: list[Tensor] = []  # a compiler does not trace list[Tensor]()
        for vector, label, factor, *others in zip(own, tiles(labels, ranks, size), factors, *parts, strict=True):
            arguments = (diverging, vector, project, label, factor, *others)
            found = (
                self._loss(*arguments) if vector is hidden or not torch.is_grad_enabled() else self._again(arguments)
            )
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
        diverging: Callable[..., Tensor],
        hidden: Tensor,
        project: Callable[[Tensor], Tensor],
        labels: Tensor,
        weights: Tensor | None,
        *others: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(the sum of the losses [], the sums of divergence and cross-entropy [2]) of some positions."""
        factor = 1.0 if weights is None else weights
        divergences = (diverging(hidden, project, labels, *others) * factor).sum()
        if not self.share:
            return divergences, torch.stack((divergences.detach(), torch.zeros_like(divergences)))
        entropy = -(self.log_probabilities(hidden, project, labels) * factor).sum()
        loss = (1 - self.share) * divergences + self.share * entropy
        return loss, torch.stack((divergences.detach(), entropy.detach()))


class DistillLoss(Chunked):
    """The divergence from a teacher that runs beside the student."""

    mixes: ClassVar[frozenset[str]] = frozenset()
    teacher: Any

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
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

        def diverging(own: Tensor, projected: Callable[[Tensor], Tensor], targets: Tensor, other: Tensor) -> Tensor:
            return self.divergence(own, projected, other, project_taught, targets, self.form)

        return self.summed_losses(diverging, hidden, project, labels, weights, vectors=(taught,))


class TopDistillLoss(Chunked):
    """The divergence from the largest probabilities of a teacher, which micro batches have."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config, dict.fromkeys((TOP_TOKENS, TOP_TAUGHT), ("batch", "sequence", "top")))

    def forward(
        self,
        hidden: Tensor,
        project: Callable[[Tensor], Tensor],
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        top_tokens: Tensor,
        top_log_probabilities: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """hidden [B, S / R, D], labels and weights [B, S], entries [B, S, k or k + 1] -> (loss, number of targets).

        The entries are tokens, and the logarithms of the probabilities of these and of all others together.
        """
        taught = (top_tokens, top_log_probabilities)
        return self.summed_losses(self.top_divergence, hidden, project, labels, weights, of_tokens=taught)


def tiles(of_tokens: Tensor, ranks: int, size: int) -> list[Tensor]:
    """[B, R n, ...] -> for each tile of `size` hidden vectors of a rank, the positions that all ranks have of it."""
    parts = of_tokens.unflatten(1, (ranks, -1)).split(size, dim=2)
    return [part.flatten(1, 2) for part in parts]
