"""The suppliers. B batch, S queries, T keys, H query heads, G KV heads, K head dim, M documents of a sample.

A backend is called as the operator that torch's own function calls once it has chosen: so no switch of torch's is
touched, and a compiler traces it. Queries, keys and values may be parts of one tensor [B, S, H + 2G, K], and none is
copied; what comes out is contiguous.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mplug.nn.attention import same_document
from mplug.nn.parts import PLAIN_PARTS, with_parts
from mplug_sdpa.parts import CUDNN_PARTS, FLASH_PARTS, packed_by_flash

aten = torch.ops.aten
Heads = tuple[Tensor, Tensor, Tensor]
Operator = Callable[[Heads, float, float, bool], Tensor]
"""((q [B, H, S, K], k and v [B, G, T, K]), scale, dropout, causal) -> [B, H, S, K]."""
Packed = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, bool], Tensor]
"""(q [B, S, H, K], k and v [B, S, G, K], lengths [B, M], scale, dropout, causal) -> [B, S, H, K]."""


def attention_by(operator: Operator, packed: Packed | None = None) -> Callable[..., Tensor]:
    """The slot's supplier: it turns heads and sequence around for an operator, as views.

    `packed` serves samples that documents are packed into; without it, a site that needs this is refused before a run.
    """

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        dropout: float = 0.0,
        keys: Tensor | None = None,
        first_head: int = 0,
        document_lengths: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor:
        """Attention: q [B, S, H, K], k and v [B, T, G, K] -> [B, S, H, K].

        Dropout draws from torch's own generator, not from `keys` and `first_head`.
        """
        if document_lengths is not None and packed is not None:
            return packed(q, k, v, document_lengths, scale, dropout, causal)
        heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return operator(heads, scale, dropout, causal).transpose(1, 2)

    return attention


def _grouped(heads: Heads) -> bool:
    return heads[0].shape[1] != heads[1].shape[1]


def _torch(heads: Heads, scale: float, dropout: float, causal: bool) -> Tensor:
    return scaled_dot_product_attention(
        *heads, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=_grouped(heads)
    )


def _cudnn(heads: Heads, scale: float, dropout: float, causal: bool) -> Tensor:
    if heads[1].shape[2] == 1:  # cuDNN takes no single key; a sample's first token has one
        return _torch(heads, scale, dropout, causal)
    operator, for_backward = aten._scaled_dot_product_cudnn_attention, torch.is_grad_enabled()
    mixed: Tensor = operator(*heads, None, for_backward, dropout, causal, scale=scale)[0]
    return mixed


def _flash(heads: Heads, scale: float, dropout: float, causal: bool) -> Tensor:
    if heads[0].shape[2] != heads[1].shape[2]:  # its mask would end with the last key, not with the first
        return _torch(heads, scale, dropout, causal)
    mixed: Tensor = aten._scaled_dot_product_flash_attention(*heads, dropout, causal, scale=scale)[0]
    return mixed


def _efficient(heads: Heads, scale: float, dropout: float, causal: bool) -> Tensor:
    q, k, v = heads
    if _grouped(heads):  # it needs a KV head for every query head
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    for_backward = torch.is_grad_enabled()
    operator = aten._scaled_dot_product_efficient_attention
    mixed: Tensor = operator(q, k, v, None, for_backward, dropout, causal, scale=scale)[0]
    return mixed


def _math(heads: Heads, scale: float, dropout: float, causal: bool, mask: Tensor | None = None) -> Tensor:
    operator = aten._scaled_dot_product_attention_math
    mixed: Tensor = operator(*heads, mask, dropout, causal, None, scale=scale, enable_gqa=_grouped(heads))[0]
    return mixed.transpose(1, 2).contiguous().transpose(1, 2)


# Documents, by a mask [B, 1, S, S] that is made for a call.


def _mask(lengths: Tensor, length: int, causal: bool) -> Tensor:
    same = same_document(lengths, length)
    return same.tril() if causal else same


def _packed_by_torch(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, dropout: float, causal: bool
) -> Tensor:
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    named = {"attn_mask": _mask(lengths, q.shape[1], causal), "dropout_p": dropout, "scale": scale}
    return scaled_dot_product_attention(*heads, **named, enable_gqa=_grouped(heads)).transpose(1, 2)


def _packed_by_math(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, dropout: float, causal: bool
) -> Tensor:
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    unseen = ~_mask(lengths, q.shape[1], causal)
    added = torch.zeros_like(unseen, dtype=q.dtype).masked_fill(unseen, float("-inf"))  # the operator only adds
    return _math(heads, scale, dropout, causal=False, mask=added).transpose(1, 2)


OPERATORS: dict[str, Operator] = {
    "torch": _torch,
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "math": _math,
}
CORES = {
    "torch": with_parts(attention_by(_torch, _packed_by_torch), PLAIN_PARTS),
    "cudnn": with_parts(attention_by(_cudnn), CUDNN_PARTS),
    "flash": with_parts(attention_by(_flash, packed_by_flash), FLASH_PARTS),
    "efficient": attention_by(_efficient),
    "math": with_parts(attention_by(_math, _packed_by_math), PLAIN_PARTS),
}
"""What the config's `backend` may come to -> suppliers."""
