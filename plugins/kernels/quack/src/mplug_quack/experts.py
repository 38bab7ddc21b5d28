"""The supplier of `Experts.compute`: experts whose SwiGLU is computed within their products.

M rows, e experts, D embed, F mlp. A tile of the first product has the gate and the other factor of the same number, so
they alternate in its result h [M, 2F]; in the weight, the gates come first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mplug_nn import Weights, fake, operator
from mplug_quack.grouped import add_multiplied_groups, bounds_of, multiply_groups
from mplug_quack.rows import aligned_rows

KIND = "swiglu"


def compute(
    rows: Tensor,
    counts: Tensor,
    up: Weights,
    down: Weights,
    kind: str,
    activation: Callable[..., Tensor],
) -> Tensor:
    """rows [M, D], counts [e] int64, up [e, 2F, D] (gate first), down [e, D, F] -> [M, D]."""
    ends = counts.cumsum(0).to(torch.int32)
    y: Tensor = _Experts.apply(rows, ends, *up, *down)  # type: ignore[no-untyped-call]
    return y


class _Experts(torch.autograd.Function):
    """h = rows upᵀ, a = silu(gate) * other, y = a downᵀ, each row with the matrices of its expert. Saves rows and h.

    Backward: one kernel computes grad_h from grad_y down, and a again for the gradient of `down`. The weights'
    gradients go into their sinks, and grad_rows = grad_h up.
    """

    @staticmethod
    def forward(ctx, rows, ends, *weights):  # type: ignore[no-untyped-def]
        up, down = Weights(*weights[:3]), Weights(*weights[3:])
        h, a = activated_groups(rows, up.values, ends)
        ctx.save_for_backward(rows, h, ends, up.values, down.values)
        ctx.sinks = up[1:], down[1:]
        return multiply_groups(a, down.values, ends, True)

    @staticmethod
    def backward(ctx, grad_y):  # type: ignore[no-untyped-def]
        rows, h, ends, *values = ctx.saved_tensors
        up, down = (Weights(one, *sink) for one, sink in zip(values, ctx.sinks, strict=True))
        needs_gradient = ctx.needs_input_grad  # (rows, ends, up, up's two of the sink, down, down's two)
        grad_h, a = gradient_of_groups(grad_y, down.values, h, ends)
        grad_down = _weight_gradient(down, grad_y, a, ends, False) if needs_gradient[5] else None
        grad_up = _weight_gradient(up, grad_h, rows, ends, True) if needs_gradient[2] else None
        grad_rows = multiply_groups(grad_h, up.values, ends, False, True) if needs_gradient[0] else None
        return grad_rows, None, grad_up, None, None, grad_down, None, None


def _weight_gradient(weight: Weights, grad: Tensor, x: Tensor, ends: Tensor, alternating: bool) -> Tensor | None:
    """Add gradᵀ x of each group to the sink of a weight; without a sink, return it."""
    total, stale, found = weight.main_grad, weight.stale, None
    if total is None:
        total = found = torch.zeros_like(weight.values)
        stale = torch.ones((), dtype=torch.bool, device="cpu")
    elif stale is None:
        stale = torch.zeros((), dtype=torch.bool, device="cpu")
    add_multiplied_groups(total, stale, grad, x, ends, alternating)
    return found


@operator("mplug_quack::activated_groups")
def activated_groups(rows: Tensor, up: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """rows [M, D], up [e, 2F, D] (gate first) -> h [M, 2F], whose gates and other factors alternate, and a [M, F]."""
    from quack.gemm_interface import gemm_gated

    h, a = _of_width(rows, up.shape[1])
    if len(rows):
        names: dict[str, Any] = {"activation": KIND, "preact_out": h, "postact_out": a, "concat_layout": ("B",)}
        gemm_gated(aligned_rows(rows), up.contiguous().mT, tuned=False, cu_seqlens_m=bounds_of(ends), **names)
    return h, a


@fake("mplug_quack::activated_groups")
def _(rows: Tensor, up: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return _of_width(rows, up.shape[1])


@operator("mplug_quack::gradient_of_groups")
def gradient_of_groups(grad_y: Tensor, down: Tensor, h: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """grad_y [M, D], down [e, D, F], h [M, 2F] -> the gradient of h [M, 2F] and a [M, F]."""
    from quack.gemm_interface import gemm_dgated

    grad_h, a = _of_width(grad_y, h.shape[1])
    if len(grad_y):
        names: dict[str, Any] = {
            "activation": KIND,
            "dx_out": grad_h,
            "postact_out": a,
            "cu_seqlens_m": bounds_of(ends),
        }
        gemm_dgated(aligned_rows(grad_y), down.contiguous(), h, tuned=False, dynamic_scheduler=False, **names)
    return grad_h, a


@fake("mplug_quack::gradient_of_groups")
def _(grad_y: Tensor, down: Tensor, h: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return _of_width(grad_y, h.shape[1])


def _of_width(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], width), x.new_empty(x.shape[0], width // 2)


@register_flop_formula(torch.ops.mplug_quack.activated_groups)
def _flops(rows: tuple[int, ...], up: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Two FLOPs per multiply-add of every row."""
    return 2 * rows[0] * up[1] * up[2]


@register_flop_formula(torch.ops.mplug_quack.gradient_of_groups)
def _flops_of_gradient(grad_y: tuple[int, ...], down: tuple[int, ...], *_: Any, **__: Any) -> int:
    """The same in backward."""
    return 2 * grad_y[0] * down[1] * down[2]
