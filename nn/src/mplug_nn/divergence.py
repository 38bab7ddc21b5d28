"""Divergences of a student's probabilities from a teacher's, token by token, also of a divided vocabulary.

P are the student's probabilities and Q the teacher's, both at a temperature T. N tokens, v the size of this process's
part of the vocabulary (all of it, or a range of it).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mplug.contracts.micro_batch import IGNORED
from mplug.model.slots.declaration import Slot
from mplug_nn.loss import AT_ONCE, CAPPED, Merge, _whole

Project = Callable[[Tensor], Tensor]
"""Hidden vectors [B, S, D] -> logits [B, S, v]."""


class Divergence(NamedTuple):
    """Which divergence, and the temperature T that divides the logits of both.

    forward: KL(Q || P). reverse: KL(P || Q). jsd: the generalised Jensen-Shannon divergence beta KL(Q || M) +
    (1 - beta) KL(P || M) with M = beta Q + (1 - beta) P (arXiv 2306.13649, section 2). There is no factor T^2.
    """

    kind: Literal["forward", "reverse", "jsd"] = "forward"
    beta: float = 0.5
    temperature: float = 1.0


def divergence(
    hidden: Tensor, project: Project, taught: Tensor, project_taught: Project, labels: Tensor, form: Divergence
) -> Tensor:
    """The default of the slot `Loss.divergence`.

    hidden [B, S, D] and the teacher's hidden vectors `taught` [B, S, E], each with its projection to the same
    vocabulary, labels [B, S] -> the divergence of each position with a target [B, S] in nats, in at least fp32; 0 at
    the others. The gradient is that of the student's logits.
    """
    found = token_divergences(project(hidden).flatten(0, -2), project_taught(taught).flatten(0, -2), form)
    return torch.where(labels == IGNORED, 0.0, found.view_as(labels))


DIVERGENCE = Slot("Loss.divergence", "loss", divergence, serves=frozenset({CAPPED}))


def token_divergences(logits: Tensor, taught: Tensor, form: Divergence, merge: Merge = _whole) -> Tensor:
    """logits [N, v] of the student and the teacher -> the divergence of each token [N], in at least fp32.

    The gradient has the dtype of the student's logits; the teacher has none. If other ranks hold the rest of the
    vocabulary, `merge` combines the values of all ranks: two maxima and three sums. Logits that are saved for backward
    keep their dtype, and are widened in chunks.
    """
    result: Tensor = _TokenDivergences.apply(logits, taught, form, merge)  # type: ignore[no-untyped-call]
    return result


def _rows(logits: Tensor) -> int:
    return max(1, len(logits) if torch.compiler.is_compiling() else AT_ONCE // (2 * logits.shape[1]))


def _scaled(logits: Tensor, form: Divergence) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / form.temperature


def _log_sums(logits: Tensor, form: Divergence, merge: Merge) -> Tensor:
    """[N, v] -> log sum_v exp(z / T) over all parts of the vocabulary [N]."""
    highest = merge(_scaled(logits.amax(dim=-1), form), "MAX")
    rows = _rows(logits)
    parts = zip(logits.split(rows), highest.split(rows), strict=True)
    sums = [(_scaled(part, form) - top[:, None]).exp().sum(dim=-1) for part, top in parts]
    return merge(torch.cat(sums), "SUM").log() + highest


def _times(weight: Tensor, log_ratio: Tensor) -> Tensor:
    """p log(p / q), which is 0 where p is 0: at padding, both logarithms are minus infinity."""
    return torch.where(weight > 0, weight * log_ratio, 0.0)


def _terms(own: Tensor, taught: Tensor, form: Divergence) -> tuple[Tensor, Tensor]:
    """log P, log Q [N, v] -> (the sum over this part of the divergence [N], that of P g [N]).

    g is the derivative of the divergence with respect to P, up to a constant; for 'forward', the second is unused.
    """
    if form.kind == "forward":
        found = _times(taught.exp(), taught - own).sum(dim=-1)
        return found, torch.zeros_like(found)
    slope = _slope(own, taught, form)
    of_own = _times(own.exp(), slope).sum(dim=-1)
    if form.kind == "reverse":
        return of_own, of_own
    return of_own + form.beta * _times(taught.exp(), taught - _mixed(own, taught, form)).sum(dim=-1), of_own


def _slope(own: Tensor, taught: Tensor, form: Divergence) -> Tensor:
    """log P, log Q [N, v] -> g: log P - log Q of 'reverse', (1 - beta) (log P - log M) of 'jsd'."""
    if form.kind == "reverse":
        return own - taught
    return (1 - form.beta) * (own - _mixed(own, taught, form))


def _mixed(own: Tensor, taught: Tensor, form: Divergence) -> Tensor:
    return torch.logaddexp(own + math.log1p(-form.beta), taught + math.log(form.beta))


class _TokenDivergences(torch.autograd.Function):
    """grad_z = (P - Q) grad / T of 'forward', and P (g - sum P g) grad / T of the others.

    For M = beta Q + (1 - beta) P, the terms from the derivative of M sum to a constant, which the softmax removes.
    """

    @staticmethod
    def forward(ctx, logits, taught, form, merge):  # type: ignore[no-untyped-def]
        own_sum, taught_sum = (_log_sums(one, form, merge) for one in (logits, taught))
        rows = _rows(logits)
        found = [
            _terms(_scaled(own, form) - own_of[:, None], _scaled(other, form) - other_of[:, None], form)
            for own, other, own_of, other_of in zip(
                *(one.split(rows) for one in (logits, taught, own_sum, taught_sum)), strict=True
            )
        ]
        result, of_own = merge(torch.stack([torch.cat(parts) for parts in zip(*found, strict=True)]), "SUM").unbind()
        ctx.form = form
        ctx.save_for_backward(logits, taught, own_sum, taught_sum, of_own)
        return result.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved, form = ctx.saved_tensors, ctx.form  # read once: a recomputed unit hands them out once
        gradient, rows = torch.empty_like(saved[0]), _rows(saved[0])
        for target, *part, of_loss in zip(*(one.split(rows) for one in (gradient, *saved, grad)), strict=True):
            own = _scaled(part[0], form) - part[2][:, None]
            taught = _scaled(part[1], form) - part[3][:, None]
            if form.kind == "forward":
                slope = own.exp() - taught.exp()
            else:
                slope = _times(own.exp(), _slope(own, taught, form) - part[4][:, None])
            target.copy_(slope * (of_loss / form.temperature)[:, None])
        return gradient, None, None, None
