"""The supplier of `Norm.norm_residual`. N rows, D row width."""

from typing import Any

import torch
from torch import Tensor

from mplug_nn import fake, operator
from mplug_nn.norm import Kind


def norm_residual(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: Kind
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), both [..., D]; computes the norm in fp32 for all input dtypes.

    Without a residual the sum is x, without a copy. Weight and bias [D] may have another dtype than x.
    """
    arguments = (x, residual, weight, bias, eps, kind == "layernorm")
    normed: tuple[Tensor, Tensor] = _Normed.apply(*arguments)  # type: ignore[no-untyped-call]
    return normed


class _Normed(torch.autograd.Function):
    """s = x + residual; y = (s - mean) / deviation * weight + bias (RMSNorm: without the mean), all [..., D].

    One kernel per pass (arXiv 1607.06450, arXiv 1910.07467). Saves s and a mean and a scale [N] per row. A product that
    needs y saves it too, because a compiler cannot look into the kernel to recompute it. Without a residual, s is x and
    autograd returns a view of it; writing in place to x or s afterwards raises autograd's error.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, centred):  # type: ignore[no-untyped-def]
        y, summed, means, scales = norm(x, residual, weight, bias, eps, centred)
        summed = x if residual is None else summed
        ctx.save_for_backward(summed, weight, means, scales)
        ctx.bias, ctx.types = bias is not None, (x.dtype, None if residual is None else residual.dtype)
        return y, summed

    @staticmethod
    def backward(ctx, grad_y, grad_summed):  # type: ignore[no-untyped-def]
        summed, weight, means, scales = ctx.saved_tensors
        grad_s, grads = norm_gradient(grad_y, grad_summed, summed, weight, means, scales, ctx.bias)
        grad_x, grad_residual = (None if dtype is None else grad_s.to(dtype) for dtype in ctx.types)
        return grad_x, grad_residual, grads[0], grads[1] if ctx.bias else None, None, None


# Operators that a compiler does not look into. Triton is imported when they run, not when they are declared.


@operator("mplug_triton::norm")
def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [..., D] -> y and s [..., D] in the dtype of the sum, means and scales [N] in fp32.

    s is empty [0] without a residual, and means are empty [0] unless `centred`.
    """
    from mplug_triton.norm_launch import forward

    outputs = _empty(x, residual, centred)
    forward(x.contiguous(), None if residual is None else residual.contiguous(), weight, bias, eps, *outputs)
    return outputs


@fake("mplug_triton::norm")
def _(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Any, eps: float, centred: bool) -> Any:
    return _empty(x, residual, centred)


def _empty(x: Tensor, residual: Tensor | None, centred: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, dtype = x.numel() // x.shape[-1], x.dtype if residual is None else torch.result_type(x, residual)
    summed = x.new_empty(0 if residual is None else x.shape, dtype=dtype)
    means = x.new_empty(rows if centred else 0, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), summed, means, x.new_empty(rows, dtype=torch.float32)


@operator("mplug_triton::norm_gradient")
def norm_gradient(
    grad_y: Tensor, grad_summed: Tensor, summed: Tensor, weight: Tensor, means: Tensor, scales: Tensor, bias: bool
) -> tuple[Tensor, Tensor]:
    """(the gradient of s [..., D], the gradients of the weight and, if there is one, the bias [1 or 2, D])."""
    from mplug_triton.norm_launch import backward

    grad_s, grads = _empty_gradients(summed, weight, bias)
    upstream = grad_y.contiguous(), grad_summed.contiguous()
    backward(*upstream, summed.contiguous(), weight, means, scales, grad_s, grads)
    return grad_s, grads


@fake("mplug_triton::norm_gradient")
def _(grad_y: Any, grad_summed: Any, summed: Tensor, weight: Tensor, means: Any, scales: Any, bias: bool) -> Any:
    return _empty_gradients(summed, weight, bias)


def _empty_gradients(summed: Tensor, weight: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    return summed.new_empty(summed.shape), weight.new_empty(2 if bias else 1, len(weight))
