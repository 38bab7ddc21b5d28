"""The suppliers. B batch, S queries, T keys, H query heads, G KV heads, K head dim.

A backend is called as the operator that torch's own function calls once it has chosen: so no switch of torch's is
touched, and a compiler traces it. Queries, keys and values may be parts of one tensor [B, S, H + 2G, K], and none is
copied; what comes out is contiguous.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

aten = torch.ops.aten
Heads = tuple[Tensor, Tensor, Tensor]
Operator = Callable[[Heads, float, float], Tensor]
"""((q [B, H, S, K], k and v [B, G, T, K]), scale, dropout) -> [B, H, S, K]."""


def attention_by(operator: Operator) -> Callable[..., Tensor]:
    """The slot's supplier: it turns heads and sequence around for an operator, as views."""

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        dropout: float = 0.0,
        keys: Tensor | None = None,
        first_head: int = 0,
    ) -> Tensor:
        """Causal attention: q [B, S, H, K], k and v [B, T, G, K] -> [B, S, H, K].

        Dropout draws from torch's own generator, not from `keys` and `first_head`.
        """
        return operator((q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), scale, dropout).transpose(1, 2)

    return attention


def _grouped(heads: Heads) -> bool:
    return heads[0].shape[1] != heads[1].shape[1]


def _torch(heads: Heads, scale: float, dropout: float) -> Tensor:
    return scaled_dot_product_attention(
        *heads, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=_grouped(heads)
    )


def _cudnn(heads: Heads, scale: float, dropout: float) -> Tensor:
    if heads[1].shape[2] == 1:  # cuDNN takes no single key; a sample's first token has one
        return _torch(heads, scale, dropout)
    for_backward = torch.is_grad_enabled()
    mixed: Tensor = aten._scaled_dot_product_cudnn_attention(*heads, None, for_backward, dropout, True, scale=scale)[0]
    return mixed


def _flash(heads: Heads, scale: float, dropout: float) -> Tensor:
    if heads[0].shape[2] != heads[1].shape[2]:  # its mask would end with the last key, not with the first
        return _torch(heads, scale, dropout)
    mixed: Tensor = aten._scaled_dot_product_flash_attention(*heads, dropout, True, scale=scale)[0]
    return mixed


def _efficient(heads: Heads, scale: float, dropout: float) -> Tensor:
    q, k, v = heads
    if _grouped(heads):  # it needs a KV head for every query head
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    for_backward = torch.is_grad_enabled()
    operator = aten._scaled_dot_product_efficient_attention
    mixed: Tensor = operator(q, k, v, None, for_backward, dropout, True, scale=scale)[0]
    return mixed


def _math(heads: Heads, scale: float, dropout: float) -> Tensor:
    operator = aten._scaled_dot_product_attention_math
    mixed: Tensor = operator(*heads, None, dropout, True, None, scale=scale, enable_gqa=_grouped(heads))[0]
    return mixed.transpose(1, 2).contiguous().transpose(1, 2)


OPERATORS: dict[str, Operator] = {
    "torch": _torch,
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "math": _math,
}
CORES = {name: attention_by(operator) for name, operator in OPERATORS.items()}
"""What the config's `backend` may come to -> suppliers."""
