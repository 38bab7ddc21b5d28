"""flash-attn-4 as operators of torch, which it is not by itself: so a compiler keeps each as one node of its graph.

B batch, S sequence, H query heads, G KV heads, K head dim. No window is named: flash-attn-4 takes one that is given as
(-1, 0), the spelling of older versions for a causal mask, for another mask, and says nothing.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("mplug_flash::forward", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, deterministic: bool) -> tuple[Tensor, Tensor]:
    """q [B, S, H, K], k and v [B, S, G, K], any strides -> (output [B, S, H, K], log-sum-exp [B, H, S] in fp32).

    `deterministic` is for backward; forward is always.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    output, sums, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=True, return_lse=True)
    return output, sums


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, deterministic: bool) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=torch.float32)


@torch.library.custom_op("mplug_flash::backward", mutates_args=())
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


@backward.register_fake
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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.deterministic = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, gradient: Tensor, of_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    """Nothing here differentiates the log-sum-exp."""
    return *backward(gradient, *ctx.saved_tensors, ctx.scale, ctx.deterministic), None, None


forward.register_autograd(_differentiate, setup_context=_keep)
