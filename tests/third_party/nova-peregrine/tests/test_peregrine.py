"""Peregrine keeps the contract of models, and computes what the paper says."""

import math
from typing import Any

import torch
from torch import Tensor

from mplug_testing import ModelSuite

SHAPE: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_hidden_size": 24,
    "vocab_size": 259,
    "init_std": 0.06,
    "qk_norm": True,
}
TINY = {f"model.{field}": value for field, value in SHAPE.items()}


class TestPeregrine(ModelSuite):
    plugin = "peregrine"
    settings = {**TINY, "model.tie_embeddings": False}
    positions = "relative"

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        return decode(weights, batch["tokens"], config.num_kv_heads, config.tie_embeddings)


class TestPeregrineWithTiedEmbeddingsAndOneKVHead(TestPeregrine):
    settings = {**TINY, "model.num_kv_heads": 1}
    layouts = tuple(f"{word} parallel.tp.sequence_parallel=false" for word in ("tp2", "tp4", "pp2tp2"))


# The formula, from the paper: y = x + MLP(LayerNorm(x)) + Attention(LayerNorm(x)) (arXiv 2204.02311, section 2).

Weights = dict[str, Tensor]


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def turned(x: Tensor, theta: float = 10000.0) -> Tensor:
    """RoFormer (arXiv 2104.09864) in complex numbers: pair i turns by position theta^(-2i/K)."""
    half = x.shape[-1] // 2
    turns = torch.arange(x.shape[1]).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * turns)[None, :, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def attention(h: Tensor, w: Weights, name: str, heads: int, groups: int, width: int) -> Tensor:
    rows = w[f"{name}.enter.weight"].split([heads * width, groups * width, groups * width, 48])
    q, k, v = (torch.einsum("bsd,od->bso", h, part).unflatten(-1, (-1, width)) for part in rows[:3])
    q, k = (turned(rms_norm(t, w[f"{name}.attn.{which}_norm"])) for t, which in ((q, "q"), (k, "k")))
    k, v = (t.repeat_interleave(heads // groups, dim=2) for t in (k, v))
    scores = torch.einsum("bshk,bthk->bhst", q, k) / math.sqrt(width)
    scores = scores - 1e30 * torch.ones(scores.shape[-2:]).double().triu(1)
    return torch.einsum("bhst,bthk->bshk", torch.softmax(scores, -1), v).flatten(-2)


def swiglu(h: Tensor, w: Weights, name: str) -> Tensor:
    gate, up = (torch.einsum("bsd,od->bso", h, part) for part in w[f"{name}.enter.weight"][-48:].split(24))
    return gate / (1 + torch.exp(-gate)) * up


def decode(w: Weights, tokens: Tensor, groups: int, tied: bool) -> Tensor:
    x = w["embedding.weight"][tokens]
    for n in range(3):
        name = f"layers.{n}"
        h, leave = layer_norm(x, w[f"{name}.norm.weight"]), w[f"{name}.leave.weight"]
        mixed = torch.einsum("bsi,oi->bso", attention(h, w, name, 4, groups, 8), leave[:, :32])
        x = x + mixed + torch.einsum("bsi,oi->bso", swiglu(h, w, name), leave[:, 32:])
    out = w["embedding.weight"] if tied else w["readout.project.weight"]
    return torch.einsum("bsd,vd->bsv", layer_norm(x, w["readout.norm.weight"]), out)
