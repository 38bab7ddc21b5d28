"""LayerNorm and RMSNorm by Transformer Engine's kernels, after the residual addition. N rows, D columns."""

from typing import Literal, Optional

import torch
from torch import Tensor

from mplug_nn import fake, operator
from mplug_te.library import library, number_of

# torch reads an operator's schema from its annotated arguments.


@operator("mplug_te::norm")
def norm(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],  # noqa: UP045 (torch reads it)
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D] -> (its norm [N, D], means [N] if `centred` (LayerNorm; else [0]), reciprocal deviations [N])."""
    tex, number = library().tex, number_of(x.dtype)
    if centred:
        shift = torch.zeros_like(weight) if bias is None else bias  # the kernel has no form without
        normed, means, deviations = tex.layernorm_fwd(x.contiguous(), weight, shift, eps, None, None, number, 0, False)
        return normed, means, deviations
    normed, _, deviations = tex.rmsnorm_fwd(x.contiguous(), weight, eps, None, None, number, 0, False)
    if bias is not None:
        normed.add_(bias)
    return normed, x.new_empty(0, dtype=torch.float32), deviations


@fake("mplug_te::norm")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty(x.shape[0], dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape[0] if centred else 0, dtype=torch.float32), rows


@operator("mplug_te::differentiate_norm")
def differentiate_norm(
    grad: Tensor, x: Tensor, weight: Tensor, means: Tensor, deviations: Tensor, centred: bool, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the norm [N, D] -> those of x [N, D], of the weight [D] and of the bias [D] (else [0])."""
    tex, none = library().tex, grad.new_empty(0)
    if centred:
        dx, of_weight, of_bias = tex.layernorm_bwd(grad, x, means, deviations, weight, 0, False)
        return dx, of_weight, of_bias if has_bias else none
    dx, of_weight = tex.rmsnorm_bwd(grad, x, deviations, weight, 0, False)
    return dx, of_weight, grad.sum(dim=0) if has_bias else none


@fake("mplug_te::differentiate_norm")
def _(
    grad: Tensor, x: Tensor, weight: Tensor, means: Tensor, deviations: Tensor, centred: bool, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight), grad.new_empty(x.shape[1] if has_bias else 0)


class _Norm(torch.autograd.Function):
    """x [N, D], weight and bias [D] -> [N, D]; backward: their gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, centred):  # type: ignore[no-untyped-def]
        normed, means, deviations = norm(x, weight, bias, eps, centred)
        ctx.save_for_backward(x, weight, means, deviations)
        ctx.centred, ctx.has_bias = centred, bias is not None
        return normed

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        dx, of_weight, of_bias = differentiate_norm(grad, *ctx.saved_tensors, ctx.centred, ctx.has_bias)
        return dx, of_weight, of_bias if ctx.has_bias else None, None, None


def norm_residual(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: Literal["layernorm", "rmsnorm"],
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), both [..., D]; without a residual, the sum is x."""
    summed = x if residual is None else x + residual
    rows = summed.reshape(-1, summed.shape[-1])
    normed: Tensor = _Norm.apply(rows, weight, bias, eps, kind == "layernorm")  # type: ignore[no-untyped-call]
    return normed.view(summed.shape), summed
