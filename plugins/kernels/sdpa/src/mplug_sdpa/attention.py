"""The suppliers of `Attention.core`, one per backend of torch.

B batch, S queries, T keys, H query heads, G KV heads, K head dim, V value width, M documents of a sample.

A supplier calls the operator that `scaled_dot_product_attention` would dispatch to. So it changes none of torch's
global backend switches, and a compiler can trace it. Queries, keys and values may be views of one tensor
[B, S, H + 2G, K] and are not copied. The output is contiguous.
"""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mplug_nn import AttentionCore, AttentionInputs, AttentionSpec
from mplug_nn.parts import PLAIN_PARTS
from mplug_nn.specification import FULL, KEY_LENGTH, VALUE_WIDTH, WINDOW, bias_of, unseen
from mplug_sdpa.documents import by_document
from mplug_sdpa.parts import CUDNN_PARTS, FLASH_PARTS, packed_by_flash
from mplug_sdpa.static import attention_to_static_keys

aten = torch.ops.aten
UNMASKED = frozenset({FULL, VALUE_WIDTH})
"""Needs that the operators serve without a mask."""
Heads = tuple[Tensor, Tensor, Tensor]
Operator = Callable[[Heads, float, float, bool], Tensor]
"""((q [B, H, S, K], k and v [B, G, T, K]), scale, dropout, causal) -> [B, H, S, K]."""
Masked = Callable[[Tensor, Tensor, Tensor, AttentionSpec, AttentionInputs], Tensor]
"""(q [B, S, H, K], k [B, T, G, K], v [B, T, G, V], specification, inputs) -> [B, S, H, V]."""


def attention_by(operator: Operator, masked: Masked | None = None) -> Callable[..., Tensor]:
    """The slot's supplier by an operator; it transposes heads and sequence, as views.

    `masked` serves specifications that need more than a causal mask. A backend without `masked` does not offer them.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        """Attention: q [B, S, H, K], k [B, T, G, K] and v [B, T, G, V] -> [B, S, H, V].

        Dropout draws from torch's own generator, not from `inputs`.
        """
        if spec.static_keys:
            return attention_to_static_keys(q, k, v, spec, inputs)
        if masked is not None and not _needs_no_mask(q, k, spec):
            if inputs.document_rows is not None and spec.bias:
                return by_document(masked, q, k, v, spec, inputs)
            return masked(q, k, v, spec, inputs)
        heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        causal = spec.causal and q.shape[1] == k.shape[1]
        return operator(heads, spec.scale, spec.dropout, causal).transpose(1, 2)

    return attention


def _needs_no_mask(q: Tensor, k: Tensor, spec: AttentionSpec) -> bool:
    """Whether a call sees all keys, or has a causal mask with as many keys as queries.

    A single query is the last position, and sees all keys. A window hides nothing from sequences that fit into it.
    """
    queries, keys = q.shape[1], k.shape[1]
    needs = spec.needs - {KEY_LENGTH} if queries in (1, keys) or not spec.causal else spec.needs
    if spec.window is not None and keys <= spec.window:
        needs -= {WINDOW}
    return needs <= UNMASKED


def _grouped(heads: Heads) -> bool:
    return heads[0].shape[1] != heads[1].shape[1]


def _torch(heads: Heads, scale: float, dropout: float, causal: bool) -> Tensor:
    return scaled_dot_product_attention(
        *heads, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=_grouped(heads)
    )


def _cudnn(heads: Heads, scale: float, dropout: float, causal: bool) -> Tensor:
    if heads[1].shape[2] == 1:  # cuDNN rejects a single key, as a sample's first token has
        return _torch(heads, scale, dropout, causal)
    operator, for_backward = aten._scaled_dot_product_cudnn_attention, torch.is_grad_enabled()
    mixed: Tensor = operator(*heads, None, for_backward, dropout, causal, scale=scale)[0]
    return mixed


def _flash(heads: Heads, scale: float, dropout: float, causal: bool) -> Tensor:
    mixed: Tensor = aten._scaled_dot_product_flash_attention(*heads, dropout, causal, scale=scale)[0]
    return mixed


def _efficient(heads: Heads, scale: float, dropout: float, causal: bool) -> Tensor:
    q, k, v = heads
    if _grouped(heads):  # the operator needs as many KV heads as query heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    for_backward = torch.is_grad_enabled()
    operator = aten._scaled_dot_product_efficient_attention
    mixed: Tensor = operator(q, k, v, None, for_backward, dropout, causal, scale=scale)[0]
    return mixed


def _math(heads: Heads, scale: float, dropout: float, causal: bool, mask: Tensor | None = None) -> Tensor:
    operator = aten._scaled_dot_product_attention_math
    mixed: Tensor = operator(*heads, mask, dropout, causal, None, scale=scale, enable_gqa=_grouped(heads))[0]
    return mixed.transpose(1, 2).contiguous().transpose(1, 2)


# Documents, windows, biases and more keys than queries, by a mask [B or 1, H or 1, S, T] that each call builds.


def _masked_by_torch(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    mask = _added(q, k, spec, inputs) if spec.bias else ~_unseen(q, k, spec, inputs)
    named = {"attn_mask": mask, "dropout_p": spec.dropout, "scale": spec.scale}
    return scaled_dot_product_attention(*heads, **named, enable_gqa=_grouped(heads)).transpose(1, 2)


def _masked_by_math(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    added = _added(q, k, spec, inputs)  # the operator takes additive masks only
    return _math(heads, spec.scale, spec.dropout, causal=False, mask=added).transpose(1, 2)


def _unseen(q: Tensor, k: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    return reduce(torch.logical_or, unseen(spec, inputs, q.shape[1], k.shape[1], q.device))


def _added(q: Tensor, k: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    """The additive mask in q's dtype: the bias, and minus infinity where a query does not see a key."""
    size = (q.shape[1], k.shape[1])
    bias = bias_of(spec, inputs, q.shape[2], *size, q.device)
    added = torch.zeros(size, dtype=q.dtype, device=q.device) if bias is None else bias.to(q.dtype)
    for mask in unseen(spec, inputs, *size, q.device):
        added = added.masked_fill(mask, float("-inf"))
    return added


def _documents_by_flash(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    assert inputs.document_lengths is not None
    return packed_by_flash(q, k, v, inputs.document_lengths, spec.scale, spec.dropout, spec.causal)


CORES = {
    "torch": AttentionCore(attention_by(_torch, _masked_by_torch), parts=PLAIN_PARTS),
    "cudnn": AttentionCore(attention_by(_cudnn), parts=CUDNN_PARTS),
    "flash": AttentionCore(attention_by(_flash, _documents_by_flash), parts=FLASH_PARTS),
    "efficient": attention_by(_efficient),
    "math": AttentionCore(attention_by(_math, _masked_by_math), parts=PLAIN_PARTS),
}
"""Backend -> supplier; the config's 'auto' selects one of them."""
