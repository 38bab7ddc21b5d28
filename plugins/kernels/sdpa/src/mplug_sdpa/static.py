"""Attention of one query per sample to the rows of a static cache.

B batch, T rows, H query heads, G KV heads, R query heads of a KV head, K head dim, V value width.
"""

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.specification import FULL, KEY_LENGTH, STATIC_KEYS, WINDOW, bias_of, unseen

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
BY_FLASH = frozenset({FULL, KEY_LENGTH, STATIC_KEYS, WINDOW})
"""Needs that flash attention serves: it reads the rows that are filled, and no others."""
WIDEST = 256


def attention_to_static_keys(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """q [B, 1, H, K], k [B, T, G, K], v [B, T, G, V] -> [B, 1, H, V]; never copies keys or values."""
    assert inputs.static is not None
    fits = q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= WIDEST
    sees_filled = spec.window is None or k.shape[1] <= spec.window
    if q.is_cuda and fits and sees_filled and spec.needs <= BY_FLASH:
        return _by_flash(q, k, v, spec, inputs)
    return _by_mask(q, k, v, spec, inputs)


def _by_flash(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """By stretches of rows, whose lengths the kernel reads from memory."""
    assert inputs.static is not None
    static, rows = inputs.static, [x.flatten(0, 1) for x in (q, k, v)]
    starts, most = (static.queries, static.begins), (1, k.shape[1])
    named = {"scale": spec.scale, "seqused_k": static.filled}
    mixed: Tensor = aten._flash_attention_forward(*rows, *starts, *most, 0.0, False, False, **named)[0]
    return mixed[:, None]


def _by_mask(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """The heads of a group are queries of their KV head: [B, G, R, K]. So no head of keys or values is repeated."""
    groups, size = k.shape[2], (1, k.shape[1])
    queries = q[:, 0].unflatten(1, (groups, -1))
    hidden = reduce(torch.logical_or, unseen(spec, inputs, *size, q.device))  # [B, 1, 1, T]
    bias = bias_of(spec, inputs, q.shape[2], *size, q.device)  # [B, H, 1, T]
    if bias is None:
        mask = ~hidden
    else:
        of_groups = bias[:, :, 0].unflatten(1, (groups, -1)).to(q.dtype)
        mask = of_groups.masked_fill(hidden, float("-inf"))
    mixed = scaled_dot_product_attention(queries, k.transpose(1, 2), v.transpose(1, 2), mask, scale=spec.scale)
    return mixed.flatten(1, 2)[:, None]
