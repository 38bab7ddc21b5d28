"""Causal linear attention by its definition (arXiv 2006.16236, equations 7 and 9): a weight for every two positions.

B batch, S length, H query heads, G KV heads, K width of a key, V width of a value.

    output_i = sum_j phi(q_i)·phi(k_j) v_j / sum_j phi(q_i)·phi(k_j)        over j <= i, with phi(x) = elu(x) + 1

A scale would appear above and below the fraction: it has no effect.
"""

import torch
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec


def feature_map(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1, which is positive; computed without the sum, in which small values would be rounded away."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def linear_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """q [B, S, H, K], k [B, S, G, K] and v [B, S, G, V] with G dividing H -> [B, S, H, V]."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    weights = torch.einsum("bshk,bthk->bhst", feature_map(q), feature_map(k)).tril()  # [B, H, S, S]
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bhst,bthv->bshv", weights, v)
