"""The compositions of `mplug_nn` with floating-point inputs widened to fp32 (fp64 stays) and results narrowed back."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mplug_nn import (
    SLOTS,
    AttentionCore,
    AttentionInputs,
    attention,
    loss,
    mlp,
    norm,
    recurrent_scan,
    short_convolution,
)
from mplug_nn.parts import PLAIN_PARTS


def in_fp32_at_least(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function computed in fp32, or fp64 for fp64 inputs; results have the first argument's dtype."""

    def computed(first: torch.Tensor, *rest: Any, **named: Any) -> Any:
        result = function(_widened(first), *map(_widened, rest), **{name: _widened(v) for name, v in named.items()})
        return _narrowed(result, first.dtype)

    return computed


def _widened(value: Any) -> Any:
    if isinstance(value, AttentionInputs):
        return AttentionInputs(*map(_widened, value))
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(torch.promote_types(value.dtype, torch.float32))
    return value


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_narrowed(one, dtype) for one in value)
    return value.to(dtype) if value.is_floating_point() else value


SUPPLIERS: dict[str, Callable[..., Any]] = {
    "Attention.core": AttentionCore(in_fp32_at_least(attention.scaled_dot_product), parts=PLAIN_PARTS),
    "Attention.prepare_qk": in_fp32_at_least(attention.prepare_qk),
    "Norm.norm_residual": in_fp32_at_least(norm.norm_residual),
    "MLP.activation": in_fp32_at_least(mlp.activation),
    "Loss.cross_entropy": loss.cross_entropy,
    "Scan.core": recurrent_scan,
    "Convolution.core": in_fp32_at_least(short_convolution),
}
"""Slot -> supplier. The loss, the parts of attention and scans compute in fp32 without widening.

A scan is the recurrence, position by position.
"""
OFFERED: dict[str, Iterable[str]] = {slot: SLOTS[slot].serves for slot in SUPPLIERS}
"""Slot -> the needs that its supplier serves: those of the composition that it calls."""
