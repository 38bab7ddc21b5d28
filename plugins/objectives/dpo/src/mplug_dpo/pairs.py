"""The losses of pairs of answers.

B samples, S positions of this process, N sequences of a sample, P = N / 2 pairs. Sequences 2i and 2i + 1 of a sample
are the chosen and the rejected answer of its pair i.
"""

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from mplug import DOCUMENTS, IGNORED, REFERENCE, SEQUENCES, MicroBatch
from mplug_dpo.config import DPOConfig
from mplug_nn import Objective, sums_of

FIGURES = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected"
)  # fmt: skip
"""The figures of every loss, with the names that TRL gives them."""
OF_ORPO = ("nll_loss", "log_odds_ratio", "log_odds_chosen")


class Answers(NamedTuple):
    """The chosen or the rejected answers of pairs, each value [B, P]."""

    log_probability: Tensor
    length: Tensor
    reference: Tensor

    @property
    def mean(self) -> Tensor:
        """The log-probability of an answer per token."""
        return self.log_probability / self.length

    @property
    def ratio(self) -> Tensor:
        """log(probability / probability under the reference)."""
        return self.log_probability - self.reference

    @property
    def log_odds(self) -> Tensor:
        """log(p / (1 - p)) of p = exp(mean)."""
        return self.mean - (-torch.expm1(self.mean)).log()


class PairLoss(Objective):
    """The sum over pairs of a loss, and the number of pairs. A pair counts if both answers have a target."""

    mixes: ClassVar[frozenset[str]] = frozenset()
    weighted: ClassVar[bool] = False

    def __init__(self, config: DPOConfig) -> None:
        entries = {SEQUENCES: ("batch", "sequence"), DOCUMENTS: ("batch", "documents")}
        entries |= {REFERENCE: ("batch", "sequence")} if config.recalls or config.reference == "data" else {}
        figures = (*FIGURES, *(OF_ORPO if config.loss == "orpo" else ()))
        super().__init__(entries, figures, config.recalls)
        self.config = config
        self.loss: Callable[[Answers, Answers], Tensor] = getattr(self, f"_{config.loss}")

    @staticmethod
    def number_in(batch: MicroBatch) -> Tensor:
        """The number of pairs in a whole micro batch whose answers both have a target."""
        targets = (batch["labels"] != IGNORED).long()[..., None]
        return _both_count(sums_of(targets, batch[SEQUENCES], _number(batch[DOCUMENTS]))[..., 0]).sum()

    def forward(
        self,
        hidden: Tensor,
        project: Callable[[Tensor], Tensor],
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        sequences: Tensor,
        document_lengths: Tensor,
        reference_log_probabilities: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """hidden [B, S, D], labels and sequences [B, S] -> (sum of the losses, number of pairs)."""
        each = self.log_probabilities(hidden, project, labels)  # [B, S]
        reference = torch.zeros_like(each) if reference_log_probabilities is None else reference_log_probabilities
        values = torch.stack((each, (labels != IGNORED).to(each.dtype), reference.to(each.dtype)), dim=-1)
        sums, share = self.over_sequences(values, sequences, _number(document_lengths))  # [B, N, 3]
        answers, counts = sums.unflatten(1, (-1, 2)), _both_count(sums[..., 1])  # [B, P, 2, 3], [B, P]
        answers = torch.where(counts[..., None, None], answers, answers.new_tensor([-1.0, 1.0, -1.0]))
        chosen, rejected = (Answers(*answers[:, :, which].unbind(dim=-1)) for which in (0, 1))
        losses = self.loss(chosen, rejected) - self.config.sft_weight * chosen.mean
        self.report(hidden, labels, share, **self._figures(chosen, rejected, counts))
        loss, num_pairs = self.counted_once((losses * counts).sum(), counts.sum(), share)
        return (loss, num_pairs, each.detach()) if self.returns else (loss, num_pairs)

    def _figures(self, chosen: Answers, rejected: Answers, counts: Tensor) -> dict[str, Tensor]:
        """The sums over pairs of what metrics report."""
        by_length = self.config.loss in ("simpo", "orpo")
        scores = [one.mean if by_length else one.log_probability for one in (chosen, rejected)]
        rewards = [self.config.beta * (one.mean if by_length else one.ratio) for one in (chosen, rejected)]
        found = {
            "rewards_chosen": rewards[0],
            "rewards_rejected": rewards[1],
            "rewards_accuracies": rewards[0] > rewards[1],
            "rewards_margins": rewards[0] - rewards[1],
            "logps_chosen": scores[0],
            "logps_rejected": scores[1],
        }
        if self.config.loss == "orpo":
            odds = chosen.log_odds - rejected.log_odds
            found |= {"nll_loss": -chosen.mean, "log_odds_ratio": logsigmoid(odds), "log_odds_chosen": odds}
        return {name: (value * counts).sum() for name, value in found.items()}

    # The losses [B, P] of pairs; formulas of the papers that the config names.

    def _sigmoid(self, chosen: Answers, rejected: Answers) -> Tensor:
        delta, flipped = self.config.beta * (chosen.ratio - rejected.ratio), self.config.label_smoothing
        return -(1 - flipped) * logsigmoid(delta) - flipped * logsigmoid(-delta)

    def _robust(self, chosen: Answers, rejected: Answers) -> Tensor:
        delta, flipped = self.config.beta * (chosen.ratio - rejected.ratio), self.config.label_smoothing
        return (flipped * logsigmoid(-delta) - (1 - flipped) * logsigmoid(delta)) / (1 - 2 * flipped)

    def _hinge(self, chosen: Answers, rejected: Answers) -> Tensor:
        return relu(1 - self.config.beta * (chosen.ratio - rejected.ratio))

    def _ipo(self, chosen: Answers, rejected: Answers) -> Tensor:
        """Ratios are per token, as the authors recommend for answers of different lengths."""
        delta = chosen.ratio / chosen.length - rejected.ratio / rejected.length
        return torch.square(delta - 1 / (2 * self.config.beta))

    def _sigmoid_norm(self, chosen: Answers, rejected: Answers) -> Tensor:
        return -logsigmoid(self.config.beta * (chosen.ratio / chosen.length - rejected.ratio / rejected.length))

    def _exo_pair(self, chosen: Answers, rejected: Answers) -> Tensor:
        """KL(p || q) of p = (sigmoid(delta), sigmoid(-delta)) and q = (1 - label_smoothing, label_smoothing)."""
        delta, flipped = self.config.beta * (chosen.ratio - rejected.ratio), self.config.label_smoothing
        own, other = logsigmoid(delta), logsigmoid(-delta)
        return own.exp() * (own - math.log1p(-flipped)) + other.exp() * (other - math.log(flipped))

    def _nca_pair(self, chosen: Answers, rejected: Answers) -> Tensor:
        first, second = self.config.beta * chosen.ratio, self.config.beta * rejected.ratio
        return -logsigmoid(first) - 0.5 * logsigmoid(-first) - 0.5 * logsigmoid(-second)

    def _bco_pair(self, chosen: Answers, rejected: Answers) -> Tensor:
        return -logsigmoid(self.config.beta * chosen.ratio) - logsigmoid(-self.config.beta * rejected.ratio)

    def _sppo_hard(self, chosen: Answers, rejected: Answers) -> Tensor:
        aim = 0.5 / self.config.beta
        return torch.square(chosen.ratio - aim) + torch.square(rejected.ratio + aim)

    def _apo_zero(self, chosen: Answers, rejected: Answers) -> Tensor:
        return torch.sigmoid(-self.config.beta * chosen.ratio) + torch.sigmoid(self.config.beta * rejected.ratio)

    def _apo_down(self, chosen: Answers, rejected: Answers) -> Tensor:
        delta = self.config.beta * (chosen.ratio - rejected.ratio)
        return torch.sigmoid(self.config.beta * chosen.ratio) + torch.sigmoid(-delta)

    def _simpo(self, chosen: Answers, rejected: Answers) -> Tensor:
        return -logsigmoid(self.config.beta * (chosen.mean - rejected.mean) - self.config.gamma)

    def _orpo(self, chosen: Answers, rejected: Answers) -> Tensor:
        return -chosen.mean - self.config.beta * logsigmoid(chosen.log_odds - rejected.log_odds)


def _number(document_lengths: Tensor) -> int:
    """The largest number of sequences in samples with documents [B, M]."""
    return document_lengths.shape[1] // 2 * 2


def _both_count(targets: Tensor) -> Tensor:
    """The numbers of targets of answers [B, N] -> whether both answers of a pair have one [B, P]."""
    has_target: Tensor = targets.unflatten(1, (-1, 2)) > 0  # [B, P, 2]
    return has_target.all(dim=-1)
