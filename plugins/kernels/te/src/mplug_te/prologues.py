"""Norms together with the product of their result, by delayed scaling: suppliers of `Linear.norm_product`.

Transformer Engine's norm kernels write fp8 numbers if the scale is known. The norm in bf16 never exists. Forward saves
this rank's fp8 numbers; backward transposes them. N rows, D inputs, P padded rows.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from mplug_nn import DelayedScaling, Inputs, Narrow, Operand, Prologue, Upstream, fake, keep_max, operator
from mplug_te.casts import ALIGNED, transposed
from mplug_te.fusion import Buffers, DelayedFusion, Saved, rows_of
from mplug_te.library import library, number_of
from mplug_te.norm import differentiate_norm, norm
from mplug_te.recipes import INPUT

NORMS = ("layernorm", "rmsnorm")

# torch reads an operator's schema from its annotated arguments.


@operator("mplug_te::quantised_norm")
def quantised_norm(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],  # noqa: UP045 (torch reads it)
    eps: float,
    centred: bool,
    scale: Tensor,
    format_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [N, D] -> (its norm in fp8 [N, D], inverse [1], largest absolute value [1], means, reciprocal deviations).

    Means and deviations are [N]; the means of an RMSNorm are [0].
    """
    te, tex, number = library().te, library().tex, number_of(getattr(torch, format_name))
    largest = torch.zeros(1, dtype=torch.float32, device=x.device)
    quantizer = te.Float8Quantizer(scale, largest, number, rowwise=True, columnwise=False)
    quantizer.internal = True
    if not _is_fused(x, bias, centred):
        normed, means, deviations = norm(x, weight, bias, eps, centred)
        found = quantizer.quantize(normed)
        return found._data, found._scale_inv, largest, means, deviations
    options = (eps, None, quantizer, number_of(x.dtype), 0, False)
    if centred:
        shift = torch.zeros_like(weight) if bias is None else bias  # the kernel has no form without
        found, means, deviations = tex.layernorm_fwd(x.contiguous(), weight, shift, *options)
    else:
        found, _, deviations = tex.rmsnorm_fwd(x.contiguous(), weight, *options)
        means = x.new_empty(0, dtype=torch.float32)
    return found._data, found._scale_inv, largest, means, deviations


def _is_fused(x: Tensor, bias: Tensor | None, centred: bool) -> bool:
    """Whether one kernel computes the norm in fp8: no RMSNorm with a bias, and whole lines of 16 numbers."""
    return (centred or bias is None) and len(x) > 0 and x.shape[1] % ALIGNED == 0


@fake("mplug_te::quantised_norm")
def _(x: Tensor, weight: Any, bias: Any, eps: Any, centred: bool, scale: Any, format_name: Any) -> Any:
    one, rows = x.new_empty(1, dtype=torch.float32), x.new_empty(x.shape[0], dtype=torch.float32)
    means = torch.empty_like(rows) if centred else x.new_empty(0, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.uint8), one, torch.empty_like(one), means, rows


class NormProduct(DelayedFusion):
    """A norm, after the residual addition, and the product of its result."""

    def forward(
        self, given: tuple[Prologue, Inputs], weight: Operand, narrow: Narrow, buffers: Buffers
    ) -> tuple[tuple[Tensor, Tensor | None], Saved]:
        """(the product, the residual stream if there is a residual, the tensors for backward)."""
        prologue, inputs = given
        x, residual, norm_weight, bias = inputs
        assert norm_weight is not None
        stream = x if residual is None else x + residual
        format_name = self.product.forward_format
        rows, inverse, largest, *statistics = quantised_norm(
            rows_of(stream),
            norm_weight,
            bias,
            prologue.eps,
            prologue.kind == "layernorm",
            buffers[DelayedScaling.scale_name(INPUT)],
            format_name,
        )
        keep_max(buffers[INPUT], largest.view(()))
        part = rows.view(x.shape)
        y = self.product.multiplied(narrow.gathered(part), inverse, weight, x.dtype)
        has_bias = [] if bias is None else [bias]
        saved = (stream, part, inverse, norm_weight, *statistics, *has_bias)
        return (narrow.scattered(y), None if residual is None else stream), saved

    def dgrad(
        self,
        upstream: Upstream,
        weight: Operand,
        saved: Saved,
        narrow: Narrow,
        buffers: Buffers,
        needs_x: bool,
    ) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], Saved]:
        """(the gradients of the sum, of the norm's weight and of its bias; the operands of `wgrad`)."""
        prologue, grad_y, grad_summed = upstream
        stream, part, inverse, norm_weight, means, deviations, *rest = saved
        kept = transposed(rows_of(part)) if narrow.before is None else part
        grad, operands = self.product.dgrad(grad_y, weight, (kept, inverse), narrow, buffers, True)
        assert grad is not None
        assert grad_summed is not None
        centred, has_bias = prologue.kind == "layernorm", bool(rest)
        of_sum, of_weight, of_bias = differentiate_norm(
            rows_of(grad), rows_of(stream), norm_weight, means, deviations, centred, has_bias
        )
        grad_x = of_sum.view(stream.shape) + grad_summed
        return (grad_x, of_weight, of_bias if has_bias else None), operands
