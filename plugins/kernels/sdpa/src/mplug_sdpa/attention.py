"""The supplier. B batch, S queries, T keys, H query heads, G KV heads, K head dim."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


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
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    mixed = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped)
    return mixed.transpose(1, 2)
