"""Attention in plain torch: the default of the slot `Attention.core`.

B batch, S query length, T key length, H query heads, G KV heads, K head dim, V value dim.
"""

import torch
from torch import Tensor

from mplug.tensors.random import mix, uniform
from mplug_nn.core import AttentionCore
from mplug_nn.parts import PLAIN_PARTS
from mplug_nn.specification import NO_INPUTS, AttentionInputs, AttentionSpec, bias_of, unseen


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs = NO_INPUTS
) -> Tensor:
    """Attention as `spec` describes it: the default of the slot `Attention.core`.

    q [B, S, H, K], k [B, T, G, K] and v [B, T, G, V] with G dividing H -> [B, S, H, V]. `mplug_nn.AttentionSpec` lists
    what a site can require, and `mplug_nn.AttentionInputs` the tensors that come with a call. This default serves
    everything that the two define. A site's needs are `spec.needs`. The host refuses a supplier whose offer does not
    declare all of them (`Offer.serves`).

    A supplier that offers 'log-sum-exp' is a `mplug_nn.AttentionCore` with `parts` (`mplug_nn.AttentionParts`). Wraps
    that compute attention part by part (context parallelism) call it. A supplier that can also compute attention from
    the packed projection, and write one packed gradient, has `packed_heads` (docs/kernels.md).
    """
    heads, groups, length = q.shape[2], k.shape[2], (q.shape[1], k.shape[1])
    if spec.static_keys:  # a cache is much larger than its query, so no head of it is repeated
        scores = torch.einsum("bgrk,btgk->bgrt", q[:, 0].unflatten(1, (groups, -1)), k).flatten(1, 2)[:, :, None]
    else:
        k, v = (x.repeat_interleave(heads // groups, dim=2) for x in (k, v))
        scores = torch.einsum("bshk,bthk->bhst", q, k)
    scores = scores * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
    bias = bias_of(spec, inputs, heads, *length, q.device)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    for mask in unseen(spec, inputs, *length, q.device):
        scores = scores.masked_fill(mask, float("-inf"))
    weights = scores.softmax(dim=-1) if inputs.sinks is None else _softmax_with_sinks(scores, inputs.sinks)
    if spec.dropout > 0 and inputs.keys is not None:
        first = inputs.first_head
        rows = mix(inputs.keys[:, None] + torch.arange(first, first + heads, device=q.device))  # [B, H]
        rows = mix(rows[..., None] + torch.arange(length[0], device=q.device))  # [B, H, S]
        kept = uniform(rows[..., None], torch.arange(length[1], device=q.device)) >= spec.dropout
        weights = weights * kept / (1 - spec.dropout)
    if spec.static_keys:
        return torch.einsum("bgrt,btgk->bgrk", weights[:, :, 0].unflatten(1, (groups, -1)), v).flatten(1, 2)[:, None]
    return torch.einsum("bhst,bthk->bshk", weights, v)


DOT_PRODUCT = AttentionCore(scaled_dot_product, parts=PLAIN_PARTS)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Scores [B, H, S, T] and each head's sink score [H] -> weights [B, H, S, T], whose sums are below 1."""
    nothing = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, nothing), dim=-1).softmax(dim=-1)[..., :-1]
