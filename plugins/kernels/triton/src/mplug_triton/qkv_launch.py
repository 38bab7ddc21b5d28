"""Launching the kernels of packed projections. B batch, S sequence, H query heads, G KV heads, K head dim."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from mplug_triton.qkv_kernels import triton_prepare_qkv, triton_prepare_qkv_backward

TILE = 1024
"""Elements of a program's tile: half of each of its rows, 16 bytes a thread in bf16."""
TOKENS = 8
"""Tokens over which a program of the backward pass sums the gradients of QK-norm's weights."""


@dataclass(frozen=True)
class Blocks:
    """How the heads of a token are dealt to programs: `q` programs for queries, `kv` for keys, and `kv` for values."""

    half: int
    rows: int
    q: int
    kv: int

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, head_dim: int) -> "Blocks":
        """Tiles of at most TILE elements, powers of two as Triton wants them."""
        half = triton.next_power_of_2(head_dim // 2)
        rows = min(triton.next_power_of_2(max(num_heads, num_kv_heads)), max(1, TILE // half))
        return cls(half, rows, triton.cdiv(num_heads, rows), triton.cdiv(num_kv_heads, rows))

    @property
    def num_warps(self) -> int:
        """8 elements a thread of a full tile, and at least a warp."""
        return max(1, self.rows * self.half // 256)


def forward(
    heads: Tensor,
    q: Tensor,
    k: Tensor,
    turns: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> None:
    """Write q [B, S, H, K] and k [B, S, G, K], both contiguous, from heads [B, S, H + 2G, K] of unit stride in K."""
    (b, s, num_heads, head_dim), num_kv_heads = q.shape, k.shape[2]
    blocks = Blocks.of(num_heads, num_kv_heads, head_dim)
    with torch.cuda.device_of(heads):
        triton_prepare_qkv[(s * (blocks.q + blocks.kv), b)](
            heads,
            q,
            k,
            turns,
            _contiguous(q_weight),
            _contiguous(k_weight),
            s,
            num_heads,
            num_kv_heads,
            *heads.stride()[:3],
            *_turn_strides(turns),
            eps,
            K=head_dim,
            HALF=blocks.half,
            ROWS=blocks.rows,
            Q_BLOCKS=blocks.q,
            KV_BLOCKS=blocks.kv,
            NORM=q_weight is not None,
            ROTATE=turns is not None,
            num_warps=blocks.num_warps,
        )


def backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    heads: Tensor | None,
    turns: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    packed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write the packed gradient, contiguous; returns partial sums of the weights' gradients, [N, blocks, K] in fp32."""
    (b, s, num_heads, head_dim), num_kv_heads = grad_q.shape, grad_k.shape[2]
    blocks, norm = Blocks.of(num_heads, num_kv_heads, head_dim), heads is not None
    tokens = TOKENS if norm else 1
    groups = triton.cdiv(s, tokens)
    sums = packed.new_empty(b * groups if norm else 0, blocks.q + blocks.kv, head_dim, dtype=torch.float32)
    with torch.cuda.device_of(packed):
        triton_prepare_qkv_backward[(groups * (blocks.q + 2 * blocks.kv), b)](
            grad_q,
            grad_k,
            grad_v,
            heads,
            packed,
            turns,
            _contiguous(q_weight),
            _contiguous(k_weight),
            sums,
            s,
            num_heads,
            num_kv_heads,
            *grad_q.stride()[:3],
            *grad_k.stride()[:3],
            *grad_v.stride()[:3],
            *((0, 0, 0) if heads is None else heads.stride()[:3]),
            *_turn_strides(turns),
            eps,
            K=head_dim,
            HALF=blocks.half,
            ROWS=blocks.rows,
            Q_BLOCKS=blocks.q,
            KV_BLOCKS=blocks.kv,
            TOKENS=tokens,
            NORM=norm,
            ROTATE=turns is not None,
            num_warps=blocks.num_warps,
        )
    return sums[:, : blocks.q], sums[:, blocks.q :]


def _contiguous(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def _turn_strides(turns: Tensor | None) -> tuple[int, int]:
    """From cosines to sines, and from sample to sample (0: all have the same positions)."""
    if turns is None:
        return 0, 0
    return turns.stride(0), turns.stride(1) if turns.shape[1] > 1 else 0
