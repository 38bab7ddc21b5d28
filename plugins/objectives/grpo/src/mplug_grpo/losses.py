"""The losses of completions with advantages.

B samples, S positions of this process, N completions of a sample. Figures of a token are 0 where there is no target.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mplug import ADVANTAGES, DOCUMENTS, IGNORED, REFERENCE, SAMPLED, SEQUENCES, MicroBatch
from mplug_grpo.config import BY_TOKENS, GRPOConfig
from mplug_nn import Objective, sums_of

CLIPPED = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
"""Shares of tokens whose ratio is clipped, with the names that TRL gives them."""
TRUNCATED, DIFFERENCE, KL = "cispo_clip_ratio", "sampling/logp_difference", "kl"


class Tokens(NamedTuple):
    """Values of tokens [B, S]: current and old log-probabilities, advantages, and whether there is a target."""

    current: Tensor
    old: Tensor
    advantages: Tensor
    counted: Tensor


def loss_of(config: GRPOConfig, seq_length: int) -> "PolicyLoss":
    """The objective of a config."""
    return TokenMean(config) if config.loss in BY_TOKENS else CompletionMean(config, config.length or seq_length)


class PolicyLoss(Objective):
    """The base class: losses and figures of tokens. Subclasses take their mean."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: GRPOConfig) -> None:
        entries = {SEQUENCES: ("batch", "sequence"), DOCUMENTS: ("batch", "documents")}
        used = {ADVANTAGES: True, SAMPLED: config.needs_sampled, REFERENCE: config.beta > 0}
        entries |= {name: ("batch", "sequence") for name, is_used in used.items() if is_used}
        figures = [TRUNCATED] if config.loss == "cispo" else [*CLIPPED]
        figures += [DIFFERENCE] if config.needs_sampled else []
        figures += [KL] if config.beta else []
        super().__init__(entries, figures, recalls=config.beta > 0)
        self.config = config

    def forward(
        self,
        hidden: Tensor,
        project: Callable[[Tensor], Tensor],
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        sequences: Tensor,
        document_lengths: Tensor,
        advantages: Tensor,
        sampled_log_probabilities: Tensor | None = None,
        reference_log_probabilities: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """hidden [B, S, D], labels and the entries of tokens [B, S] -> (sum of the losses, what divides it)."""
        scaled = hidden if self.config.temperature == 1.0 else hidden / self.config.temperature
        each = self.log_probabilities(scaled, project, labels)  # [B, S]
        counted = labels != IGNORED
        sampled = each.detach()
        if sampled_log_probabilities is not None:
            sampled = torch.where(counted, sampled_log_probabilities.to(each.dtype), 0.0)
        old = sampled if self.config.old == "sampled" else each.detach()
        tokens = Tokens(each, old, advantages.to(each.dtype), counted)
        losses, figures = self.of_policy(tokens, sequences, document_lengths.shape[1])
        if self.config.needs_sampled:
            figures[DIFFERENCE] = (each.detach() - sampled).abs()
            losses = losses * self._correction(each.detach() - sampled, sequences, document_lengths.shape[1])
        if reference_log_probabilities is not None:
            figures[KL] = self._kl(torch.where(counted, reference_log_probabilities.to(each.dtype), 0.0) - each)
            losses = losses + self.config.beta * figures[KL]
        values = torch.stack([counted.to(each.dtype), losses, *(figures[name].to(each.dtype) for name in self.figures)])
        values = torch.where(counted, values, 0.0)
        if not self.training:
            loss, number = self.lack(tokens, sampled, sequences, document_lengths.shape[1])
        else:
            loss, number = self.mean(hidden, labels, values, sequences, document_lengths.shape[1])
        return (loss, number, each.detach()) if self.returns else (loss, number)

    def lack(self, tokens: Tokens, sampled: Tensor, sequences: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The loss of an evaluation: minus the mean advantage that the model's own completions would have.

        It is estimated from completions of a sampler, by ratios of tokens. The model's own held-out completions have
        their rewards as advantages, and the ratio 1: the loss is minus the mean reward. Returns the sum over
        completions, and the number of these.
        """
        counted = tokens.counted.to(tokens.current.dtype)
        weighted = (tokens.current - sampled).exp() * tokens.advantages
        values = torch.stack((counted, torch.where(tokens.counted, weighted, 0.0)), dim=-1)
        sums, share = self.over_sequences(values, sequences, number)  # [B, N, 2]
        means = sums[..., 1] / sums[..., 0].clamp(min=1.0)
        return self.counted_once(-means.sum(), (sums[..., 0] > 0).sum(), share)

    def mean(
        self, hidden: Tensor, labels: Tensor, values: Tensor, sequences: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """Report the figures of values [2 + figures, B, S]; returns (sum of the losses, what divides it)."""
        raise NotImplementedError

    def of_policy(self, tokens: Tokens, sequences: Tensor, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses [B, S] without the divergence from a reference, and figures of tokens."""
        ratio = (tokens.current - tokens.old).exp()
        if self.config.loss == "cispo":
            found = {TRUNCATED: (ratio > self.config.high) & (tokens.advantages > 0)}
            return -ratio.clamp(max=self.config.high).detach() * tokens.advantages * tokens.current, found
        return self.clipped(ratio, tokens.advantages)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """-min(r A, clip(r) A) of ratios and advantages of one shape (PPO, arXiv 1707.06347), and what is clipped."""
        low, high = 1 - self.config.epsilon, self.config.high
        is_low, is_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
        found = dict(zip(CLIPPED, (is_low, is_high, is_low | is_high), strict=True))
        bounded = ratio if self.config.delta is None else ratio.clamp(max=self.config.delta)
        return -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages), found

    def whole(self, values: Tensor, sequences: Tensor, number: int) -> Tensor:
        """values [B, S] of tokens -> their sums over the whole completion of each token [B, S]."""
        sums, _ = self.over_sequences(values[..., None], sequences, number)  # [B, N, 1]
        return sums[..., 0].gather(1, sequences.clamp(min=0))

    def _kl(self, d: Tensor) -> Tensor:
        """Estimates of the KL divergence (joschu.net/blog/kl-approx) by log reference - log model [B, S]."""
        return d.exp() - d - 1 if self.config.kl == "k3" else d.square() / 2

    def _correction(self, difference: Tensor, sequences: Tensor, number: int) -> Tensor | float:
        """Factors on losses by the current log-probabilities minus those of the sampler [B, S]."""
        kind, _, what = self.config.correction.partition("_")
        if kind == "none":
            return 1.0
        ratio = (difference if kind == "token" else self.whole(difference, sequences, number)).exp()
        most = self.config.correction_max
        return ratio.clamp(max=most) if what == "truncate" else torch.where(ratio > most, 0.0, ratio)


class TokenMean(PolicyLoss):
    """The mean over all tokens of the global batch."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def mean(
        self, hidden: Tensor, labels: Tensor, values: Tensor, sequences: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """The number of targets divides the sums."""
        sums = values.flatten(1).sum(dim=1)
        self.report(hidden, labels, **_named(self.figures, sums[2:]))
        return sums[1], (labels != IGNORED).sum()


class CompletionMean(PolicyLoss):
    """The mean over completions that have a target: of means over their tokens, or of sums divided by `length`."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: GRPOConfig, length: int) -> None:
        super().__init__(config)
        self.length = length

    @staticmethod
    def number_in(batch: MicroBatch) -> Tensor:
        """The number of completions of a whole micro batch that have a target."""
        targets = (batch["labels"] != IGNORED).long()[..., None]
        return (sums_of(targets, batch[SEQUENCES], batch[DOCUMENTS].shape[1]) > 0).sum()

    def of_policy(self, tokens: Tokens, sequences: Tensor, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Of gspo, all tokens of a completion have the geometric mean of their ratios.

        The gradient of a token's ratio is that by its own log-probability: their mean is the gradient of the
        completion's ratio, also where ranks divide the completion.
        """
        if self.config.loss != "gspo":
            return super().of_policy(tokens, sequences, number)
        current = tokens.current.detach()
        log_ratio = torch.where(tokens.counted, current - tokens.old, 0.0)
        count = self.whole(tokens.counted.to(current.dtype), sequences, number).clamp(min=1.0)
        mean = self.whole(log_ratio, sequences, number) / count
        return self.clipped((mean + tokens.current - current).exp(), tokens.advantages)

    def mean(
        self, hidden: Tensor, labels: Tensor, values: Tensor, sequences: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """The number of completions divides the sums."""
        sums, share = self.over_sequences(values.permute(1, 2, 0), sequences, number)  # [B, N, 2 + figures]
        has_target = sums[..., 0] > 0
        means = sums[..., 1:] / sums[..., :1].clamp(min=1.0)
        self.report(hidden, labels, share, **_named(self.figures, means[..., 1:].sum(dim=(0, 1))))
        losses = sums[..., 1] / self.length if self.config.loss == "dr_grpo" else means[..., 0]
        return self.counted_once(losses.sum(), has_target.sum(), share)


def _named(figures: tuple[str, ...], sums: Tensor) -> dict[str, Tensor]:
    return {name.replace("/", "_"): one for name, one in zip(figures, sums.unbind(), strict=True)}
