"""flash-attn-4 as operators of torch, which it is not by itself: so a compiler keeps each as one node of its graph.

B batch, S sequence, H query heads, G KV heads, K head dim. No window is named: flash-attn-4 takes one that is given as
(-1, 0), the spelling of older versions for a causal mask, for another mask, and says nothing.
"""

import torch
from torch import Tensor

from mplug.nn import fake, operator


@operator("mplug_flash::forward")
def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, deterministic: bool) -> tuple[Tensor, Tensor]:
    """q [B, S, H, K], k and v [B, S, G, K], any strides -> (output [B, S, H, K], log-sum-exp [B, H, S] in fp32).

    `deterministic` is for backward; forward is always.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    output, sums, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=True, return_lse=True)
    return output, sums


@fake("mplug_flash::forward")
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, deterministic: bool) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=torch.float32)


@operator("mplug_flash::backward")
def backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the output [B, S, H, K] -> those of q [B, S, H, K], k and v [B, S, G, K]."""
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    named = {"softmax_scale": scale, "causal": True, "deterministic": deterministic}
    _flash_attn_bwd(q, k, v, output, gradient, sums, **named, dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


@fake("mplug_flash::backward")
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Attention(torch.autograd.Function):
    """Both operators as one function that is differentiated; nothing here differentiates the log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v, scale, deterministic):  # type: ignore[no-untyped-def]
        output, sums = forward(q, k, v, scale, deterministic)
        ctx.save_for_backward(q, k, v, output, sums)
        ctx.scale, ctx.deterministic = scale, deterministic
        return output

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return *backward(gradient, *ctx.saved_tensors, ctx.scale, ctx.deterministic), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, deterministic: bool) -> Tensor:
    """q [B, S, H, K], k and v [B, S, G, K] -> [B, S, H, K], differentiable."""
    output: Tensor = _Attention.apply(q, k, v, scale, deterministic)  # type: ignore[no-untyped-call]
    return output
