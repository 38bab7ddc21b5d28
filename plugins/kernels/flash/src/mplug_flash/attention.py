"""The suppliers, one a version. B batch, S sequence, H query heads, G KV heads, K head dim."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from mplug_flash import fourth

Compute = Callable[[Tensor, Tensor, Tensor, float, float, bool], Tensor]
"""(q [B, S, H, K], k and v [B, S, G, K], scale, dropout, deterministic) -> [B, S, H, K]."""


@cache
def core(version: int, deterministic: bool) -> Callable[..., Tensor]:
    """The supplier of a version; with `deterministic`, its backward gives the same bits for the same call."""
    compute = COMPUTES[version]

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
        """Causal attention: q [B, S, H, K], k and v [B, S, G, K] -> [B, S, H, K], contiguous.

        Dropout draws from torch's own generator, not from `keys` and `first_head`. Other lengths of keys than of
        queries are a ValueError: flash-attn's mask would end with the last key, not begin with the first.
        """
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"{q.shape[1]} queries and {k.shape[1]} keys: flash-attn's causal mask needs as many")
        return compute(q, k, v, scale, dropout, deterministic)

    return attention


def _fourth(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, deterministic: bool) -> Tensor:
    return fourth.attention(q, k, v, scale, deterministic)


def _third(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, deterministic: bool) -> Tensor:
    from flash_attn_interface import flash_attn_func

    return _output(flash_attn_func(q, k, v, softmax_scale=scale, causal=True, deterministic=deterministic))


def _second(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, deterministic: bool) -> Tensor:
    from flash_attn import flash_attn_func

    more = {"dropout_p": dropout, "deterministic": deterministic}
    return _output(flash_attn_func(q, k, v, softmax_scale=scale, causal=True, **more))


def _output(given: Any) -> Tensor:
    """Some releases give the log-sum-exp, too."""
    output: Tensor = given[0] if isinstance(given, tuple) else given
    return output


COMPUTES: dict[int, Compute] = {4: _fourth, 3: _third, 2: _second}
