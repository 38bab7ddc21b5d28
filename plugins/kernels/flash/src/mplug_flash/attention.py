"""The suppliers, one per version.

B batch, S sequence, H query heads, G KV heads, K head dim, M documents of a sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

import mplug_flash.fourth as fourth
from mplug_flash.fourth import FourthPacked, FourthParts, begins
from mplug_nn import AttentionCore, AttentionInputs, AttentionSpec


@dataclass(frozen=True)
class How:
    """The options of a call; `lengths` [B, M] are the document lengths of packed samples."""

    scale: float
    dropout: float
    deterministic: bool
    causal: bool
    lengths: Tensor | None


Compute = Callable[[Tensor, Tensor, Tensor, How], Tensor]
"""(q [B, S, H, K], k and v [B, S, G, K], how) -> [B, S, H, K]."""


def core(version: int, deterministic: bool, *, packed_heads: bool = False) -> Callable[..., Tensor]:
    """The supplier of a version; with `deterministic`, its backward is bitwise reproducible.

    With `packed_heads`, version 4 also attends from packed heads.
    """
    return _core(version, deterministic, packed_heads and version == 4)


@cache
def _core(version: int, deterministic: bool, packed_heads: bool) -> Callable[..., Tensor]:
    compute = COMPUTES[version]

    def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        """Attention: q [B, S, H, K], k and v [B, S, G, K] -> [B, S, H, K], contiguous.

        Dropout draws from torch's own generator, not from `inputs`.
        """
        how = How(spec.scale, spec.dropout, deterministic, spec.causal, inputs.document_lengths)
        return compute(q, k, v, how)

    if version != 4:
        return attention
    packed = FourthPacked(deterministic) if packed_heads else None
    return AttentionCore(attention, parts=FourthParts(deterministic), packed_heads=packed)


def _fourth(q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
    return fourth.attention(q, k, v, how.scale, how.deterministic, how.causal, how.lengths)


def _third(q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
    import flash_attn_interface as library

    return _computed(library, q, k, v, how, {})


def _second(q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
    import flash_attn as library

    return _computed(library, q, k, v, how, {"dropout_p": how.dropout})


def _computed(library: Any, q: Tensor, k: Tensor, v: Tensor, how: How, more: dict[str, Any]) -> Tensor:
    more |= {"softmax_scale": how.scale, "causal": how.causal, "deterministic": how.deterministic}
    if how.lengths is None:
        return _output(library.flash_attn_func(q, k, v, **more))
    where, longest = begins(how.lengths), q.shape[1]
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    output = _output(library.flash_attn_varlen_func(*rows, where, where, longest, longest, **more))
    return output.unflatten(0, q.shape[:2])


def _output(given: Any) -> Tensor:
    """The output; some releases return the log-sum-exp too."""
    output: Tensor = given[0] if isinstance(given, tuple) else given
    return output


COMPUTES: dict[int, Compute] = {4: _fourth, 3: _third, 2: _second}
