"""FlashAttention-2 (arXiv 2307.08691): softmax over blocks of keys as they come, and its gradients.

B batch, S length, H query heads, G KV heads, R = H/G query heads that share a KV head, K head dim, b block.

    forward (algorithm 1), a block of queries i            backward (algorithm 2), a block of keys j
    for every block of keys j that is not its future:      for every block of queries i that is not its past:
        s = scale q_i k_jᵀ         m' = max(m, s)              p = exp(scale q_i k_jᵀ - L_i)
        p = exp(s - m')            c = exp(m - m')             dv_j += pᵀ do_i
        l = c l + sum p            o = c o + p v_j             ds = scale p (do_i v_jᵀ - D_i)
    o_i = o / l                    L_i = m + log l             dq_i += ds k_j         dk_j += dsᵀ q_i

with D_i = sum_k do_i o_i. Between the two passes only q, k, v, o and the log-sum-exp L [B, H, S] are kept.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs, *, block: int) -> Tensor:
    """Causal attention: q [B, S, H, K], k and v [B, S, G, K] -> [B, S, H, K].

    Sites with needs or dropout are refused before the run, so only the scale of the specification matters.
    """
    groups = k.shape[2]
    q = q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # [B, G, R, S, K]
    k, v = (x.permute(0, 2, 1, 3)[:, :, None] for x in (k, v))  # [B, G, 1, S, K]
    mixed: Tensor = _BlockAttention.apply(q, k, v, spec.scale, block)
    return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)


class _BlockAttention(torch.autograd.Function):
    """q [B, G, R, S, K], k and v [B, G, 1, S, K] -> [B, G, R, S, K], summed in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, block: int) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        mixed = torch.empty_like(q)
        log_sum_exp = q.new_empty(q.shape[:-1], dtype=wide)  # [B, G, R, S]
        for own in _blocks(0, q.shape[-2], block):
            highest = q.new_full(log_sum_exp[..., own].shape, float("-inf"), dtype=wide)  # [B, G, R, b]
            total = torch.zeros_like(highest)
            values = q.new_zeros(q[..., own, :].shape, dtype=wide)  # [B, G, R, b, K]
            for past in _blocks(0, own.stop, block):
                scores = _scores(q, k, own, past, scale)  # [B, G, R, b, b]
                higher = torch.maximum(highest, scores.amax(-1))
                weights, shrink = (scores - higher[..., None]).exp(), (highest - higher).exp()
                total = shrink * total + weights.sum(-1)
                values = shrink[..., None] * values + weights @ v[..., past, :].to(wide)
                highest = higher
            mixed[..., own, :] = values / total[..., None]
            log_sum_exp[..., own] = highest + total.log()
        ctx.save_for_backward(q, k, v, mixed, log_sum_exp)
        ctx.scale, ctx.block = scale, block
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, mixed, log_sum_exp = ctx.saved_tensors
        wide, length = log_sum_exp.dtype, q.shape[-2]
        delta = (grad.to(wide) * mixed).sum(-1)  # [B, G, R, S]
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        for past in _blocks(0, length, ctx.block):
            for own in _blocks(past.start, length, ctx.block):
                weights = (_scores(q, k, own, past, ctx.scale) - log_sum_exp[..., own, None]).exp()
                grad_own, values = grad[..., own, :].to(wide), v[..., past, :].to(wide)
                grad_scores = ctx.scale * weights * (grad_own @ values.mT - delta[..., own, None])  # [B, G, R, b, b]
                grad_q[..., own, :] += grad_scores @ k[..., past, :].to(wide)
                grad_k[..., past, :] += _over_sharers(grad_scores.mT @ q[..., own, :].to(wide))
                grad_v[..., past, :] += _over_sharers(weights.mT @ grad_own)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _blocks(start: int, stop: int, block: int) -> Iterator[slice]:
    """Stretches of a sequence, the last of which may be shorter."""
    for first in range(start, stop, block):
        yield slice(first, min(first + block, stop))


def _scores(q: Tensor, k: Tensor, own: slice, past: slice, scale: float) -> Tensor:
    """Scores [B, G, R, b, b] of a block of queries for a block of keys, -inf in a query's future."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scale * (q[..., own, :].to(wide) @ k[..., past, :].to(wide).mT)
    positions = torch.arange(q.shape[-2], device=q.device)
    return scores.masked_fill(positions[past] > positions[own, None], float("-inf"))


def _over_sharers(grad: Tensor) -> Tensor:
    """[B, G, R, b, K] -> [B, G, 1, b, K]: query heads that share a KV head add up."""
    return grad.sum(2, keepdim=True)
