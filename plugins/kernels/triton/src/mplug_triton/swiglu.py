"""SwiGLU whose gradient is one kernel: a supplier of `MLP.activation`. [..., F] activations.

A compiler writes both halves of the gradient in one kernel, too, but that kernel reads its inputs once for each half.
Forward is plain torch, which the compiler fuses with its neighbours, and computes again if a product needs it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mplug_nn import fake, operator
from mplug_nn.mlp import Kind

BLOCK, NUM_WARPS = 1024, 4
"""Numbers of a row that a program processes."""


def activation(x: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    """silu(gate) * up of x [..., 2F] (gate first) plus bias -> [..., F]."""
    y: Tensor = _SwiGLU.apply(x if bias is None else x + bias)  # type: ignore[no-untyped-call]
    return y


class _SwiGLU(torch.autograd.Function):
    """y = silu(gate) up; with s = sigmoid(gate): grad_up = grad_y gate s, grad_gate = grad_y up s (1 + gate (1 - s)).

    It saves x [..., 2F] only.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        return swiglu_gradient(grad_y, *ctx.saved_tensors)


@operator("mplug_triton::swiglu_gradient")
def swiglu_gradient(grad_y: Tensor, x: Tensor) -> Tensor:
    """grad_y [..., F], x [..., 2F] (gate first) -> the gradient of x [..., 2F]."""
    from mplug_triton.swiglu_kernel import triton_swiglu_gradient

    grad_y, x = grad_y.contiguous(), x.contiguous()
    grad_x, width = torch.empty_like(x), grad_y.shape[-1]
    if grad_y.numel():
        grid = grad_y.numel() // width, -(-width // BLOCK)
        with torch.cuda.device_of(x):
            triton_swiglu_gradient[grid](grad_y, x, grad_x, F=width, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return grad_x


@fake("mplug_triton::swiglu_gradient")
def _(grad_y: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
