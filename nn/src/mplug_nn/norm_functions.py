"""The functions of norms: the entries of the open list `mplug.norms`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mplug_nn.named import Named, differs_in_parts, tried_numbers
from mplug_nn.open_lists import NORMS as NAMES


@dataclass(frozen=True)
class NormFunction:
    """An entry of the list. `compute(x [..., D], weight [D], bias [D] or None, eps)` -> [..., D], of each row alone.

    Weights start as `initial`.
    """

    compute: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    initial: float = 1.0


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _rmsnorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    normed = F.rms_norm(x, weight.shape, weight, eps)
    return normed if bias is None else normed + bias


def offset(weight: Tensor) -> Tensor:
    """1 + weight, in at least fp32: near 1, bf16 has too few numbers for small weights."""
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))


def _offset_layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    scale = offset(weight)
    wide = None if bias is None else bias.to(scale.dtype)
    return F.layer_norm(x.to(scale.dtype), weight.shape, scale, wide, eps).to(x.dtype)


def _offset_rmsnorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    scale = offset(weight)
    normed = F.rms_norm(x.to(scale.dtype), weight.shape, scale, eps)
    return (normed if bias is None else normed + bias).to(x.dtype)


LAYERNORM = NormFunction(_layernorm)
"""arXiv 1607.06450."""
RMSNORM = NormFunction(_rmsnorm)
"""arXiv 1910.07467."""
OFFSET_LAYERNORM = NormFunction(_offset_layernorm, initial=0.0)
"""LayerNorm whose scale is 1 + weight."""
OFFSET_RMSNORM = NormFunction(_offset_rmsnorm, initial=0.0)
"""RMSNorm whose scale is 1 + weight, in fp32 until the end (Gemma)."""


def _fault(entry: NormFunction) -> str:
    x = tried_numbers()
    weight, bias = 1 + x[0].abs(), x[1]
    for given in (None, bias):
        if differs_in_parts(lambda rows, bias=given: entry.compute(rows, weight, bias, 1e-5), 0, x):
            return (
                "does not compute each row alone, so its result would depend on the other tokens of a micro batch; "
                "reduce along the last dimension only (dim=-1, keepdim=True)"
            )
    return ""


NORMS = Named(NAMES, NormFunction, plain=("layernorm", "rmsnorm"), fault=_fault)
