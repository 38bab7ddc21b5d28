"""The supplier of `Attention.prepare_qkv`. B batch, S sequence, H query heads, G KV heads, K head dim."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mplug_nn import Preparation, fake, operator
from mplug_nn.turning import Turning, table_of_rotations


def _prepare_qkv(
    heads: Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    theta: Turning | None,
    prepare_qk: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """heads [B, S, H + 2G, K], positions [1 or B, S] -> q [B, S, H, K], k and v [B, S, G, K].

    q and k are normalised if there are weights [K] and rotated if there is `theta`, in fp32 for any dtype of heads. v
    is a view of heads. `prepare_qk`, the default of the narrower slot, is not called.
    """
    if q_weight is None and theta is None:
        return heads.split((num_heads, num_kv_heads, num_kv_heads), dim=2)  # type: ignore[return-value]
    turns = None if theta is None else table_of_rotations(positions, heads.shape[-1], theta, torch.float32)
    arguments = (heads, num_heads, num_kv_heads, turns, q_weight, k_weight, eps)
    prepared: tuple[Tensor, Tensor, Tensor] = _Prepared.apply(*arguments)  # type: ignore[no-untyped-call]
    return prepared


prepare_qkv = Preparation(_prepare_qkv, passes_through=True)


class _Prepared(torch.autograd.Function):
    """R is the rotation and N the norm of a row; either may be absent. One kernel per pass.

    forward   heads [B, S, H + 2G, K] = (x_q, x_k, x_v) -> R N_q x_q [B, S, H, K], R N_k x_k and x_v [B, S, G, K]
    backward  grad_heads = (N_qᵀ Rᵀ grad_q, N_kᵀ Rᵀ grad_k, grad_v), and the weights' gradients [K]

    The view of x_v is made inside this function, because autograd's own split would concatenate the three gradients.
    """

    @staticmethod
    def forward(ctx, heads, num_heads, num_kv_heads, turns, q_weight, k_weight, eps):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(heads if q_weight is not None else None, turns, q_weight, k_weight)
        ctx.eps = eps
        q, k = prepare_qk(heads, num_heads, num_kv_heads, turns, q_weight, k_weight, eps)
        return q, k, heads[:, :, num_heads + num_kv_heads :]

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):  # type: ignore[no-untyped-def]
        heads, turns, q_weight, k_weight = ctx.saved_tensors
        grads = packed_gradient(grad_q, grad_k, grad_v, heads, turns, q_weight, k_weight, ctx.eps)
        grad_weights = (None, None) if q_weight is None else grads[1:]
        return grads[0], None, None, None, *grad_weights, None


# Operators that a compiler does not look into. Triton is imported when they run, not when they are declared.


@operator("mplug_triton::prepare_qk")
def prepare_qk(
    heads: Tensor,
    num_heads: int,
    num_kv_heads: int,
    turns: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """heads [B, S, H + 2G, K], cosines and sines [2, 1 or B, S, K/2], weights [K] -> q [B, S, H, K], k [B, S, G, K]."""
    from mplug_triton.qkv_launch import forward

    q, k = _empty_qk(heads, num_heads, num_kv_heads)
    forward(_rows(heads), q, k, turns, q_weight, k_weight, eps)
    return q, k


@fake("mplug_triton::prepare_qk")
def _(heads: Tensor, num_heads: int, num_kv_heads: int, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty_qk(heads, num_heads, num_kv_heads)


@operator("mplug_triton::packed_gradient")
def packed_gradient(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    heads: Tensor | None,
    turns: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of heads [B, S, H + 2G, K] and of the weights [K] (empty [0] without weights).

    grad_q [B, S, H, K], grad_k and grad_v [B, S, G, K] may have any strides. `heads` is required if there are weights.
    """
    from mplug_triton.qkv_launch import backward

    packed = _empty_packed(grad_q, grad_k)
    upstream = (_rows(grad_q), _rows(grad_k), _rows(grad_v))
    sums = backward(*upstream, None if heads is None else _rows(heads), turns, q_weight, k_weight, eps, packed)
    return packed, *(
        _gradient_of(weight, part, packed) for weight, part in zip((q_weight, k_weight), sums, strict=True)
    )


@fake("mplug_triton::packed_gradient")
def _(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    heads: Tensor | None,
    turns: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    packed = _empty_packed(grad_q, grad_k)
    return packed, *(packed.new_empty(0) if w is None else torch.empty_like(w) for w in (q_weight, k_weight))


def _empty_qk(heads: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    b, s, _, k = heads.shape
    return heads.new_empty(b, s, num_heads, k), heads.new_empty(b, s, num_kv_heads, k)


def _empty_packed(grad_q: Tensor, grad_k: Tensor) -> Tensor:
    b, s, h, k = grad_q.shape
    return grad_q.new_empty(b, s, h + 2 * grad_k.shape[2], k)


def _rows(x: Tensor) -> Tensor:
    """The tensor with contiguous rows [K], which the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _gradient_of(weight: Tensor | None, sums: Tensor, packed: Tensor) -> Tensor:
    return packed.new_empty(0) if weight is None else sums.sum((0, 1)).to(weight.dtype)
