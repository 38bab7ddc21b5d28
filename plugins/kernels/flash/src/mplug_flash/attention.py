"""The suppliers, one per version.

B batch, S sequence, H query heads, G KV heads, K head dim.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

import mplug_flash.fourth as fourth
from mplug_flash.fourth import FourthPacked, FourthParts, Parts, begins
from mplug_nn import AttentionCore, AttentionInputs, AttentionSpec

Compute = Callable[[Tensor, Tensor, Tensor, AttentionSpec, AttentionInputs, bool], Tensor]
"""(q [B, S, H, K], k and v [B, S, G, K], specification, inputs, deterministic) -> [B, S, H, K]."""


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
        return compute(q, k, v, spec, inputs, deterministic)

    if version != 4:
        return attention
    packed = FourthPacked(deterministic) if packed_heads else None
    return AttentionCore(attention, parts=FourthParts(deterministic), packed_heads=packed)


def _third(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs, deterministic: bool
) -> Tensor:
    import flash_attn_interface as library

    return _computed(library, (q, k, v), spec, inputs, {"deterministic": deterministic})


def _second(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs, deterministic: bool
) -> Tensor:
    import flash_attn as library

    return _computed(library, (q, k, v), spec, inputs, {"deterministic": deterministic, "dropout_p": spec.dropout})


def _computed(library: Any, qkv: Parts, spec: AttentionSpec, inputs: AttentionInputs, more: dict[str, Any]) -> Tensor:
    more |= {"softmax_scale": spec.scale, "causal": spec.causal}
    if inputs.document_lengths is None:
        return _output(library.flash_attn_func(*qkv, **more))
    where, (batch, longest) = begins(inputs.document_lengths), qkv[0].shape[:2]
    rows = [x.flatten(0, 1) for x in qkv]
    output = _output(library.flash_attn_varlen_func(*rows, where, where, longest, longest, **more))
    return output.unflatten(0, (batch, longest))


def _output(given: Any) -> Tensor:
    """The output; some releases return the log-sum-exp too."""
    output: Tensor = given[0] if isinstance(given, tuple) else given
    return output


COMPUTES: dict[int, Compute] = {4: fourth.attention, 3: _third, 2: _second}
