"""Attention in plain torch by keyword arguments, for tests that need one property of it."""

from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec, scaled_dot_product


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = True,
    dropout: float = 0.0,
    keys: Tensor | None = None,
    document_lengths: Tensor | None = None,
) -> Tensor:
    """q [B, S, H, K], k [B, S, G, K] and v [B, S, G, V] -> [B, S, H, V]."""
    spec = AttentionSpec(
        scale, q.shape[3], v.shape[3], causal=causal, documents=document_lengths is not None, dropout=dropout
    )
    return scaled_dot_product(q, k, v, spec, AttentionInputs(keys, document_lengths))
