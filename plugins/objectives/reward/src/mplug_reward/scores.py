"""The score of an answer, and the loss of pairs of answers.

B samples, S positions of this process, D embed, N sequences of a sample, P = N / 2 pairs. Sequences 2i and 2i + 1 of a
sample are the chosen and the rejected answer of its pair i.
"""

from collections.abc import Callable, Container
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mplug import DOCUMENTS, MARGINS, SEQUENCES, MicroBatch, Shift
from mplug_nn import ScoredObjective, sums_of
from mplug_reward.config import RewardConfig

NEXT = "next_sequences"
"""The entry with the number of the sequence of the next position [B, S]; -1 at the last position of a document."""
LABELS = ("reward",)
"""The name of the score in a published form."""
FIGURES = ("accuracy", "margin", "mean_reward")
"""The figures, with the names that TRL gives them."""


class RewardLoss(ScoredObjective):
    """The sum over pairs of -log sigmoid(chosen - rejected - margin), and the number of pairs (arXiv 2204.05862).

    An answer's score is that of its last position. `center_coefficient` c adds c (chosen + rejected)^2 (arXiv
    2312.09244). Llama 2 introduces the margin (arXiv 2307.09288, section 3.2.2).
    """

    mixes: ClassVar[frozenset[str]] = frozenset()
    weighted: ClassVar[bool] = False

    def __init__(self, config: RewardConfig, dim: int, of_loader: Container[str]) -> None:
        tokens = ("batch", "sequence")
        entries = {SEQUENCES: tokens, NEXT: tokens, DOCUMENTS: ("batch", "documents")}
        entries |= {MARGINS: tokens} if MARGINS in of_loader else {}
        super().__init__(dim, LABELS, config.init_std, entries, FIGURES, {NEXT: Shift(SEQUENCES, 1, -1)})
        self.config = config

    @staticmethod
    def number_in(batch: MicroBatch) -> Tensor:
        """The number of pairs in a whole micro batch."""
        present = torch.ones_like(batch[SEQUENCES])[..., None]
        return _both(sums_of(present, batch[SEQUENCES], _number(batch[DOCUMENTS]))[..., 0]).sum()

    def forward(
        self,
        hidden: Tensor,
        project: Callable[[Tensor], Tensor],
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        sequences: Tensor,
        next_sequences: Tensor,
        document_lengths: Tensor,
        margins: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [B, S, D], sequences [B, S] -> (sum of the losses, number of pairs)."""
        scores = self.scores(hidden)[..., 0]  # [B, S]
        ends = (sequences >= 0) & (next_sequences != sequences)
        given = torch.zeros_like(scores) if margins is None else margins.to(scores.dtype)
        values = torch.stack((torch.where(ends, scores, 0.0), ends.to(scores.dtype), given), dim=-1)
        sums, share = self.over_sequences(values, sequences, _number(document_lengths))  # [B, N, 3]
        rewards, present, margin = sums.unflatten(1, (-1, 2)).unbind(dim=-1)  # [B, P, 2] each
        counts = (present > 0).all(dim=-1)  # [B, P]
        chosen, rejected = rewards.unbind(dim=-1)
        losses = -logsigmoid(chosen - rejected - margin.sum(dim=-1))
        if self.config.center_coefficient:
            losses = losses + self.config.center_coefficient * torch.square(chosen + rejected)
        figures = {
            "accuracy": chosen > rejected,
            "margin": chosen - rejected,
            "mean_reward": (chosen + rejected) / 2,
        }
        self.report(hidden, labels, share, **{name: (value * counts).sum() for name, value in figures.items()})
        return self.counted_once((losses * counts).sum(), counts.sum(), share)


def _number(document_lengths: Tensor) -> int:
    """The largest number of sequences in samples with documents [B, M]."""
    return document_lengths.shape[1] // 2 * 2


def _both(present: Tensor) -> Tensor:
    """The numbers of positions of answers [B, N] -> whether both answers of a pair have one [B, P]."""
    found: Tensor = (present.unflatten(1, (-1, 2)) > 0).all(dim=-1)
    return found
