"""Losses and log-probabilities of targets, and the language-model loss: a sum and a count.

The host divides the sum once, by one global token count.

N tokens, v the size of this process's part of the vocabulary (all of it, or a range of it).
"""

from collections.abc import Callable, Container
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from mplug.contracts.micro_batch import IGNORED as IGNORED
from mplug.contracts.micro_batch import LOSS_WEIGHTS
from mplug.model.slots.declaration import Slot

CAPPED = "logit soft cap"
"""The need of a loss whose `project` is more than a `Linear`."""
WEIGHTED = LOSS_WEIGHTS
"""The need of a loss in a run whose micro batches have weights of losses: the argument `weights`."""

AT_ONCE = 1 << 26
"""Number of logits that are widened to fp32 at a time. Compiled code widens in registers and ignores this."""


Merge = Callable[[Tensor, Literal["SUM", "MAX"]], Tensor]
"""Values [N] computed from one part of the vocabulary -> their sum or maximum over all parts [N]."""


def _whole(values: Tensor, op: Literal["SUM", "MAX"]) -> Tensor:
    return values


def cross_entropy(
    hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The default of the slot `Loss.cross_entropy`.

    hidden [B, S, D], `project` to logits [B, S, V] (a `Linear`), labels [B, S] -> (sum of the losses in nats, at least
    fp32; number of targets, int64). A supplier may project in chunks, so that the logits never exist at once. At sites
    that need 'logit soft cap', `project` is a function that also caps the logits. At sites that need 'loss_weights',
    `weights` [B, S] multiply the losses of the labels; they do not change the number of targets.
    """
    flat = labels.flatten()
    counted = flat != IGNORED
    return loss_sum(project(hidden).flatten(0, -2), flat, factors(counted, weights)), counted.sum()


def factors(counted: Tensor, weights: Tensor | None) -> Tensor:
    """What multiplies the loss of each token [N]: whether it has a target, times its weight [B, S]."""
    return counted if weights is None else counted * weights.flatten()


def log_probabilities(hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
    """The default of the slot `Loss.log_probabilities`, which objectives call instead of `Loss.cross_entropy`.

    The arguments are those of `Loss.cross_entropy`. Returns the logarithm of the probability of each label [B, S], in
    at least fp32; 0 where there is no target. The gradient is that of the logits.
    """
    flat = labels.flatten()
    losses = token_losses(project(hidden).flatten(0, -2), flat)
    return torch.where(labels == IGNORED, 0.0, -losses.view_as(labels))


CROSS_ENTROPY = Slot("Loss.cross_entropy", "loss", cross_entropy, serves=frozenset({CAPPED, WEIGHTED}))
LOG_PROBABILITIES = Slot("Loss.log_probabilities", "loss", log_probabilities, serves=frozenset({CAPPED}))


def loss_sum(logits: Tensor, labels: Tensor, factor: Tensor, merge: Merge = _whole) -> Tensor:
    """The sum of factor * `token_losses` [].

    `factor` [N]: whether the token has a target, or its weight, and 0 without one (`factors`).
    """
    return (token_losses(logits, labels, merge) * factor).sum()


def token_losses(logits: Tensor, labels: Tensor, merge: Merge = _whole) -> Tensor:
    """log sum_v exp(z_nv) - z_n,label of each token [N] in nats, in at least fp32.

    logits [N, v]; labels [N], negative if the label is not among these v (or there is none). The gradient has the
    logits' dtype. If other ranks hold the rest of the vocabulary, `merge` combines the values of all ranks (arXiv
    1909.08053, section 3). The logits saved for backward keep their dtype, and are widened in chunks.
    """
    result: Tensor = _TokenLosses.apply(logits, labels, merge)  # type: ignore[no-untyped-call]
    return result


def _rows(logits: Tensor) -> int:
    return max(1, len(logits) if torch.compiler.is_compiling() else AT_ONCE // logits.shape[1])


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _TokenLosses(torch.autograd.Function):
    """grad_z = (softmax(z) - onehot(label)) grad, computed from the logits and log sum exp(z) alone."""

    @staticmethod
    def forward(ctx, logits, labels, merge):  # type: ignore[no-untyped-def]
        rows = _rows(logits)
        highest = merge(_wide(logits.amax(dim=-1)), "MAX")
        parts = zip(logits.split(rows), highest.split(rows), strict=True)
        sums = [(_wide(part) - top[:, None]).exp().sum(dim=-1) for part, top in parts]
        log_sum = merge(torch.cat(sums), "SUM").log() + highest
        at_label = _wide(logits.gather(1, labels.clamp(min=0)[:, None])[:, 0])
        ctx.save_for_backward(logits, labels, log_sum)
        return log_sum - merge(torch.where(labels < 0, 0.0, at_label), "SUM")

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # read once: a recomputed unit hands them out once
        logits = saved[0]
        gradient, columns = torch.empty_like(logits), torch.arange(logits.shape[1], device=logits.device)
        parts = zip(*(tensor.split(_rows(logits)) for tensor in (gradient, *saved, grad)), strict=True)
        for target, part, label, log_sum, of_loss in parts:
            probabilities = (_wide(part) - log_sum[:, None]).exp()
            at_label = (columns == label[:, None]).to(probabilities.dtype)
            target.copy_((probabilities - at_label) * of_loss[:, None])
        return gradient, None, None


class Loss(nn.Module):
    """Next-token cross-entropy; `soft_cap` is that of the logits, which the head applies."""

    SLOTS: ClassVar[tuple[Slot, ...]] = (CROSS_ENTROPY,)
    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, soft_cap: float | None = None) -> None:
        super().__init__()
        self.soft_cap = soft_cap
        self.cross_entropy = cross_entropy

    def needs(self, slot: str, entries: Container[str]) -> frozenset[str]:
        """What a supplier of the slot must offer here."""
        needs = {CAPPED: self.soft_cap is not None, WEIGHTED: LOSS_WEIGHTS in entries}
        return frozenset(need for need, is_needed in needs.items() if is_needed)

    def forward(
        self, hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """hidden [B, S, D], labels and weights [B, S] -> (loss sum, number of targets)."""
        if weights is None:
            return self.cross_entropy(hidden, project, labels)
        return self.cross_entropy(hidden, project, labels, weights)
