"""The divergence of a student's probabilities from the largest ones of a teacher, also of a divided vocabulary.

P are the student's probabilities and Q the teacher's. k tokens have probabilities of their own, and all others share
one: the rest. N tokens, v the size of this process's part of the vocabulary (all of it, or a range of it).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mplug.contracts.micro_batch import IGNORED
from mplug.model.slots.declaration import Slot
from mplug_nn.loss import AT_ONCE, CAPPED, Merge, _whole


def top_divergence(
    hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor, tokens: Tensor, taught: Tensor
) -> Tensor:
    """The default of the slot `Loss.top_divergence`.

    hidden [B, S, D], `project` to logits [B, S, V], labels [B, S]; `tokens` [B, S, k] are different tokens, and
    `taught` [B, S, k + 1] the logarithms of the teacher's probabilities of these and of all others together -> of each
    position with a target [B, S] the sum of q log(q / p) over these k + 1 probabilities in nats, in at least fp32; 0 at
    the others. It is KL(Q || P) if k = V, and at most that otherwise. The gradient is that of the logits.
    """
    found = token_top_divergences(project(hidden).flatten(0, -2), tokens.flatten(0, -2), taught.flatten(0, -2))
    return torch.where(labels == IGNORED, 0.0, found.view_as(labels))


TOP_DIVERGENCE = Slot("Loss.top_divergence", "loss", top_divergence, serves=frozenset({CAPPED}))


def token_top_divergences(logits: Tensor, columns: Tensor, taught: Tensor, merge: Merge = _whole) -> Tensor:
    """logits [N, v], the columns [N, k] of the tokens, taught [N, k + 1] -> the divergence of each token [N].

    A column is -1 if the token is not among these v. If other ranks hold the rest of the vocabulary, `merge` combines
    the values of all ranks: a maximum and two sums. The gradient has the dtype of the logits, which are widened in
    chunks.
    """
    result: Tensor = _TopDivergences.apply(logits, columns, taught, merge)  # type: ignore[no-untyped-call]
    return result


def _rows(logits: Tensor) -> int:
    return max(1, len(logits) if torch.compiler.is_compiling() else AT_ONCE // (4 * logits.shape[1]))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _placed(values: Tensor, columns: Tensor, width: int) -> Tensor:
    """values [n, k] at their columns [n, k] of [n, width], zeros elsewhere; those of column -1 are left out."""
    spare = torch.where(columns < 0, width, columns)
    return values.new_zeros(len(values), width + 1).scatter(1, spare, values)[:, :width]


def _others(logits: Tensor, columns: Tensor) -> Tensor:
    """The wide logits [n, v], minus infinity at the columns."""
    chosen = _placed(torch.ones_like(columns), columns, logits.shape[1])
    return _wide(logits).masked_fill(chosen > 0, float("-inf"))


def log_of_others(logits: Tensor, columns: Tensor, merge: Merge) -> Tensor:
    """log sum exp(z) over the tokens of all parts but those of the columns [N]; minus infinity if there is none."""
    parts = [*zip(*(one.split(_rows(logits)) for one in (logits, columns)), strict=True)]
    highest = merge(torch.cat([_others(*part).amax(dim=-1) for part in parts]), "MAX")
    highest = highest.masked_fill(highest == float("-inf"), 0.0)
    tops = highest.split(_rows(logits))
    sums = [(_others(*part) - top[:, None]).exp().sum(dim=-1) for part, top in zip(parts, tops, strict=True)]
    return merge(torch.cat(sums), "SUM").log() + highest


class _TopDivergences(torch.autograd.Function):
    """grad_z = (P sum(q) - q) grad at the k tokens, (P sum(q) - q_rest P / P_rest) grad at the others."""

    @staticmethod
    def forward(ctx, logits, columns, taught, merge):  # type: ignore[no-untyped-def]
        of_others = log_of_others(logits, columns, merge)
        own = torch.where(columns < 0, 0.0, _wide(logits.gather(1, columns.clamp(min=0))))
        own = torch.cat((merge(own, "SUM"), of_others[:, None]), dim=1)  # [N, k + 1]
        log_sum, taught = own.logsumexp(dim=-1), taught.to(own.dtype)
        ctx.save_for_backward(logits, columns, taught, log_sum, of_others)
        weight = taught.exp()
        return torch.where(weight > 0, weight * (taught - own + log_sum[:, None]), 0.0).sum(dim=-1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # read once: a recomputed unit hands them out once
        gradient, rows = torch.empty_like(saved[0]), _rows(saved[0])
        for target, part, columns, taught, log_sum, of_others, of_loss in zip(
            *(one.split(rows) for one in (gradient, *saved, grad)), strict=True
        ):
            weight = taught.exp()
            slope = (_wide(part) - log_sum[:, None]).exp() * weight.sum(dim=-1, keepdim=True)
            slope = slope - _placed(weight[:, :-1], columns, part.shape[1])
            exists = of_others > float("-inf")
            shares = (_others(part, columns) - torch.where(exists, of_others, 0.0)[:, None]).exp()
            target.copy_((slope - weight[:, -1:] * shares) * of_loss[:, None])
        return gradient, None, None, None
