"""Attention part by part: stretches of queries against stretches of keys, and what puts the parts together again.

B batch, S query length, T key length, H query heads, G KV heads, K head dim, N stretches. Over the parts of its keys, a
query's output is the mean of the parts' outputs, weighted by the exponentials of their log-sum-exps (FlashAttention,
arXiv 2205.14135, section 3.1). Backward needs no more than the whole's output and log-sum-exp: with P = exp(scores -
log-sum-exp), every part has its own share of dq, dk and dv.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Lengths = tuple[Tensor, Tensor]
"""(of queries, of keys), int64 [B, N] each, in all S and T: stretch n of the queries sees that of the keys alone."""

C = TypeVar("C", bound=Callable[..., Any])


class AttentionParts(Protocol):
    """What a supplier of `Attention.core` that offers 'log-sum-exp' has as its attribute `parts`.

    q [B, S, H, K], k and v [B, T, G, K], of any strides, with G dividing H. A part is full, or causal, with as many
    keys as queries (and in every stretch of `lengths` as many). Lengths come where the site needs 'document_lengths'.
    Both methods are called inside an operator: no compiler sees them, nor does autograd.
    """

    name: str
    """A word that no other parts of the process have: it becomes part of an operator's name."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, lengths: Lengths | None = None
    ) -> tuple[Tensor, Tensor]:
        """(output [B, S, H, K], log-sum-exp [B, H, S] of the scores in fp32 at least).

        A query without a key has zeros, and minus infinity.
        """

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        *,
        scale: float,
        causal: bool,
        lengths: Lengths | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This part's (dq, dk, dv), given the gradient, the output and the log-sum-exp of the whole."""


def with_parts(core: C, parts: AttentionParts) -> C:
    """The same supplier of `Attention.core`, which now has `parts`."""
    core.parts = parts  # type: ignore[attr-defined]
    return core


def parts_of(core: Callable[..., Any]) -> AttentionParts:
    """The parts of a supplier of `Attention.core`; ValueError where it has none."""
    parts: AttentionParts | None = getattr(core, "parts", None)
    if parts is None:
        raise ValueError(f"{core!r} computes attention whole only; its 'supports' must refuse 'log-sum-exp'")
    return parts


def numbered(lengths: Tensor, length: int) -> Tensor:
    """Which stretch each of `length` positions is in: lengths [B, N] -> [B, length]."""
    ends = lengths.cumsum(dim=1)  # [B, N]
    return torch.searchsorted(
        ends, torch.arange(length, device=ends.device).expand(len(ends), -1).contiguous(), right=True
    )


class PlainParts:
    """The parts of the composition in plain torch: scores in memory, in fp32 at least."""

    name = "plain"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, lengths: Lengths | None = None
    ) -> tuple[Tensor, Tensor]:
        """(output [B, S, H, K], log-sum-exp [B, H, S])."""
        scores = _scores(q, k, scale, causal, lengths)
        log_sum_exp = scores.logsumexp(dim=-1)
        output = torch.einsum("bhst,bthk->bshk", _weights(scores, log_sum_exp), _wide(v, q))
        return output.to(q.dtype), log_sum_exp

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        *,
        scale: float,
        causal: bool,
        lengths: Lengths | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq [B, S, H, K], dk and dv [B, T, G, K])."""
        weights = _weights(_scores(q, k, scale, causal, lengths), log_sum_exp)  # [B, H, S, T]
        grad, output = grad.to(weights.dtype), output.to(weights.dtype)
        of_weights = torch.einsum("bshk,bthk->bhst", grad, _wide(v, q))
        inner = (grad * output).sum(dim=-1).transpose(1, 2)[..., None]  # [B, H, S, 1]
        of_scores = weights * (of_weights - inner) * scale
        dq = torch.einsum("bhst,bthk->bshk", of_scores, _wide(k, q))
        dk = torch.einsum("bhst,bshk->bthk", of_scores, q.to(weights.dtype))
        dv = torch.einsum("bhst,bshk->bthk", weights, grad)
        return dq.to(q.dtype), _over_sharers(dk, k), _over_sharers(dv, v)


PLAIN_PARTS = PlainParts()


def _wide(x: Tensor, q: Tensor) -> Tensor:
    """x [B, T, G, K] in fp32 at least, with a head for each of q's: [B, T, H, K]."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, lengths: Lengths | None) -> Tensor:
    """[B, H, S, T], minus infinity where a query does not see a key."""
    scores = torch.einsum("bshk,bthk->bhst", q.to(torch.promote_types(q.dtype, torch.float32)), _wide(k, q)) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if lengths is not None:
        of_queries, of_keys = numbered(lengths[0], q.shape[1]), numbered(lengths[1], k.shape[1])
        others = of_queries[:, None, :, None] != of_keys[:, None, None, :]
        scores = scores.masked_fill(others, float("-inf"))
    return scores


def _weights(scores: Tensor, log_sum_exp: Tensor) -> Tensor:
    """exp(scores - log-sum-exp); zeros for a query without a key."""
    nothing = log_sum_exp == float("-inf")
    weights: Tensor = (scores - log_sum_exp.masked_fill(nothing, 0.0)[..., None]).exp()
    return weights


def _over_sharers(grad: Tensor, x: Tensor) -> Tensor:
    """[B, T, H, K] -> [B, T, G, K]: query heads that share a KV head add up."""
    summed: Tensor = grad.unflatten(2, (x.shape[2], -1)).sum(dim=3)
    return summed.to(x.dtype)
