"""Decoders written from the papers, in plain torch: references of the families that have no other one.

B samples, S sequence, D embed. `w` are weights by name, `c` the family's config.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def norm(x: Tensor, w: Weights, name: str, c: Any) -> Tensor:
    """Layer normalization (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467)."""
    if c.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    return rms_norm(x, w[f"{name}.weight"], c.norm_eps) + w.get(f"{name}.bias", 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (arXiv 1910.07467)."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def affine(x: Tensor, w: Weights, name: str) -> Tensor:
    """A linear layer, with a bias if there is one."""
    return torch.einsum("bsi,oi->bso", x, w[f"{name}.weight"]) + w.get(f"{name}.bias", 0)


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions (arXiv 2104.09864): coordinates i and i + K/2 are a plane, turned by position theta^(-2i/K)."""
    half = x.shape[-1] // 2
    speeds = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    angles = (positions[0, :, None].double() * speeds)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def attention(x: Tensor, w: Weights, name: str, c: Any, positions: Tensor) -> Tensor:
    """Causal attention with grouped heads (arXiv 1706.03762, 2305.13245) and QK-norm (arXiv 2010.04245)."""
    heads, groups, length = c.num_attention_heads, c.num_kv_heads or c.num_attention_heads, x.shape[1]
    rows = affine(x, w, f"{name}.qkv").unflatten(-1, (heads + 2 * groups, -1))
    q, k, v = rows[:, :, :heads], rows[:, :, heads : heads + groups], rows[:, :, heads + groups :]
    if c.qk_norm:
        q, k = (rms_norm(t, w[f"{name}.{which}_norm"], c.norm_eps) for t, which in ((q, "q"), (k, "k")))
    if c.position == "rotary":
        q, k = turned(q, positions, c.rope_theta), turned(k, positions, c.rope_theta)
    q = q.unflatten(2, (groups, heads // groups))
    scores = torch.einsum("bsgjk,btgk->bgjst", q, k) / math.sqrt(rows.shape[-1])
    if c.position == "alibi":  # arXiv 2108.12409: head n of 4 has the slope 4^-n
        distances = (torch.arange(length)[:, None] - torch.arange(length)).abs().double()
        slopes = 4.0 ** -torch.arange(1, heads + 1).double()
        scores = scores - slopes.reshape(groups, heads // groups, 1, 1) * distances
    weights = torch.softmax(scores - 1e30 * torch.ones(length, length).double().triu(1), -1)
    return affine(torch.einsum("bgjst,btgk->bsgjk", weights, v).flatten(2), w, f"{name}.out")


def gated(h: Tensor) -> Tensor:
    """SwiGLU (arXiv 2002.05202), the gate's half first."""
    gate, up = h.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def decode(
    w: Weights, c: Any, tokens: Tensor, positions: Tensor, feed_forward: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Logits of a pre-norm decoder (GPT-2, section 2.3); `feed_forward(h, n)` is that part of block n."""
    x = w["embedding.token.weight"][tokens]
    if c.position == "learned":
        x = x + w["embedding.position.weight"][positions]
    for n in range(c.num_layers):
        x = x + attention(norm(x, w, f"blocks.{n}.norm1", c), w, f"blocks.{n}.attn", c, positions)
        x = x + feed_forward(norm(x, w, f"blocks.{n}.norm2", c), n)
    out = w["embedding.token.weight"] if c.tie_embeddings else w["head.project.weight"]
    return torch.einsum("bsd,vd->bsv", norm(x, w, "head.norm", c), out)
