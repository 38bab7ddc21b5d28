"""Causal linear attention in chunks: sums over what lies before a chunk (arXiv 2006.16236, algorithm 1), weights in it.

B batch, S length, H query heads, G KV heads, R = H/G query heads that share a KV head, K width of a key, V width of a
value, N chunks of C positions. With a one added to every value, the last column of what is summed is the normaliser:

    state_n  = sum over the chunks before n of phi(k)ᵀ [v, 1]           [K, V + 1]
    [y, z]_n = phi(q) state_n + tril(phi(q) phi(k)ᵀ) [v, 1]             [C, V + 1]
    output_n = y / z

Sums are in fp32 at least.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mplug_nn import AttentionInputs, AttentionSpec
from nova_linear.weights import feature_map


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs, *, chunk: int) -> Tensor:
    """q [B, S, H, K], k [B, S, G, K] and v [B, S, G, V] with G dividing H -> [B, S, H, V]."""
    length, groups = q.shape[1], k.shape[2]
    chunk = min(chunk, length)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = _chunks(feature_map(q.to(wide)).unflatten(2, (groups, -1)), chunk)  # [B, G, R, N, C, K]
    keys = _chunks(feature_map(k.to(wide))[:, :, :, None], chunk)  # [B, G, 1, N, C, K]
    values = _chunks(F.pad(v.to(wide), (0, 1), value=1.0)[:, :, :, None], chunk)  # [B, G, 1, N, C, V + 1]
    sums = keys.mT @ values  # [B, G, 1, N, K, V + 1]
    before = F.pad(sums[:, :, :, :-1], (0, 0, 0, 0, 1, 0)).cumsum(3)
    summed = queries @ before + (queries @ keys.mT).tril() @ values  # [B, G, R, N, C, V + 1]
    summed = summed.flatten(3, 4)[:, :, :, :length]  # what fills up the last chunk has a normaliser of zero
    output = summed[..., :-1] / summed[..., -1:]
    return output.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, S, G, R, W] -> [B, G, R, N, C, W], the last chunk filled up with zeros."""
    padded = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return padded.permute(0, 2, 3, 1, 4).unflatten(3, (-1, chunk))
