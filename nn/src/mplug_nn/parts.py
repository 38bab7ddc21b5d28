"""Attention in parts: segments of queries against segments of keys, and the combination of the parts.

B batch, S query length, T key length, H query heads, G KV heads, K head dim, N segments. If the keys of a query are
divided into parts, the query's output is the mean of the parts' outputs, weighted by the exponentials of their
log-sum-exps (FlashAttention, arXiv 2205.14135, section 3.1). Backward needs only the output and the log-sum-exp of the
whole: with P = exp(scores - log-sum-exp), every part computes its own share of dq, dk and dv.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mplug.tensors.segments import numbered as numbered
from mplug_nn.specification import unseen_by_position

Lengths = tuple[Tensor, Tensor]
"""Lengths of the segments (of queries, of keys), int64 [B, N] each, with sums S and T.

Segment n of the queries sees only segment n of the keys.
"""


Ranges = tuple[range, ...]
"""Positions of a sequence, in order."""


class Places(NamedTuple):
    """Where the queries and keys of a part are in the sequence, for attention that depends on their distance.

    `queries` and `keys` have S and T positions. In a causal part, a query sees no later key, but for those of its own
    group. With `window`, it sees only keys that are fewer than `window` positions away; in a causal part, this bounds
    the earlier keys alone. `groups` are the numbers of the groups of queries [B, S] and of keys [B, T], -1: in none.
    """

    queries: Ranges
    keys: Ranges
    window: int | None = None
    groups: tuple[Tensor, Tensor] | None = None

    def together(self) -> Tensor | None:
        """Whether a query and a key are in the same group [B, 1, S, T]; None without groups."""
        if self.groups is None:
            return None
        of_queries, of_keys = self.groups
        return ((of_queries[:, :, None] == of_keys[:, None, :]) & (of_queries >= 0)[:, :, None])[:, None]


class Part(NamedTuple):
    """One part of attention: some queries, some keys with their values, and which query sees which key.

    q [B, S, H, K], k and v [B, T, G, K], of any strides, with G dividing H. A part is full or causal. A causal part
    without `places` has as many keys as queries, also in every segment of `lengths`. `lengths` is None unless the site
    needs 'document_lengths', and `places` is None unless the supplier offers 'parts by position'.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool
    lengths: Lengths | None = None
    places: Places | None = None


class AttentionParts:
    """The field `parts` of an `AttentionCore` that offers 'log-sum-exp'.

    A supplier's class implements `attend` and `differentiate`. Wraps that compute attention part by part (context
    parallelism) call `forward` and `backward`, inside an operator, so neither a compiler nor autograd traces them.
    """

    name: str
    """A word that is unique among the parts of the process. It becomes part of an operator's name."""

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        """(output [B, S, H, K], log-sum-exp [B, H, S] of the scores in at least fp32).

        For a query without a key, the output is zeros and the log-sum-exp minus infinity.
        """
        raise NotImplementedError

    def differentiate(
        self, part: Part, grad: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This part's (dq [B, S, H, K], dk and dv [B, T, G, K]).

        `grad` [B, S, H, K], `output` [B, S, H, K] and `log_sum_exp` [B, H, S] are those of the whole, over all parts.
        """
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        causal: bool,
        lengths: Lengths | None = None,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`attend`, for callers."""
        return self.attend(Part(q, k, v, scale, causal, lengths, places))

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
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`differentiate`, for callers."""
        return self.differentiate(Part(q, k, v, scale, causal, lengths, places), grad, output, log_sum_exp)


class PlainParts(AttentionParts):
    """The parts of the plain-torch composition: scores are materialized, in at least fp32."""

    name = "plain"

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        """(output [B, S, H, K], log-sum-exp [B, H, S])."""
        scores = _scores(part)
        log_sum_exp = scores.logsumexp(dim=-1)
        output = torch.einsum("bhst,bthk->bshk", _weights(scores, log_sum_exp), _wide(part.v, part.q))
        return output.to(part.q.dtype), log_sum_exp

    def differentiate(
        self, part: Part, grad: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq [B, S, H, K], dk and dv [B, T, G, K])."""
        q, k, v = part.q, part.k, part.v
        weights = _weights(_scores(part), log_sum_exp)  # [B, H, S, T]
        grad, output = grad.to(weights.dtype), output.to(weights.dtype)
        of_weights = torch.einsum("bshk,bthk->bhst", grad, _wide(v, q))
        inner = (grad * output).sum(dim=-1).transpose(1, 2)[..., None]  # [B, H, S, 1]
        of_scores = weights * (of_weights - inner) * part.scale
        dq = torch.einsum("bhst,bthk->bshk", of_scores, _wide(k, q))
        dk = torch.einsum("bhst,bshk->bthk", of_scores, q.to(weights.dtype))
        dv = torch.einsum("bhst,bshk->bthk", weights, grad)
        return dq.to(q.dtype), _over_sharers(dk, k), _over_sharers(dv, v)


PLAIN_PARTS = PlainParts()


def positions_in(ranges: Ranges, device: torch.device) -> Tensor:
    """The positions of ranges, int64 [S]."""
    return torch.cat([torch.arange(one.start, one.stop, device=device) for one in ranges])


def _wide(x: Tensor, q: Tensor) -> Tensor:
    """x [B, T, G, K] in at least fp32, repeated to one head per head of q: [B, T, H, K]."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _scores(part: Part) -> Tensor:
    """[B, H, S, T], minus infinity for pairs in which the query does not see the key."""
    q, k, _, scale, causal, lengths, places = part
    scores = torch.einsum("bshk,bthk->bhst", q.to(torch.promote_types(q.dtype, torch.float32)), _wide(k, q)) * scale
    if places is not None:
        distances = positions_in(places.keys, q.device) - positions_in(places.queries, q.device)[:, None]
        for mask in unseen_by_position(distances, causal, places.window, places.together()):
            scores = scores.masked_fill(mask, float("-inf"))
    elif causal:
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
    """[B, T, H, K] -> [B, T, G, K]: the sum over the query heads that share a KV head."""
    summed: Tensor = grad.unflatten(2, (x.shape[2], -1)).sum(dim=3)
    return summed.to(x.dtype)
