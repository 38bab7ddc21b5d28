"""Launches the kernels of packed QKV projections. B batch, S sequence, H query heads, G KV heads, K head dim."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from mplug_triton.qkv_kernels import triton_prepare_qkv, triton_prepare_qkv_backward

TILE = 1024
"""Elements of a program's tile, which holds one half of each row; 16 bytes per thread in bf16."""
TOKENS = 8
"""Number of tokens over which a backward program sums the gradients of QK-norm's weights."""


@dataclass(frozen=True)
class Blocks:
    """The split of a token's heads over programs: `q` programs for queries, `kv` for keys, and `kv` for values.

    A tile has `rows` rows of `half` elements.
    """

    half: int
    rows: int
    q: int
    kv: int

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, head_dim: int) -> "Blocks":
        """Blocks with tiles of at most TILE elements (at least one row); Triton requires powers of two."""
        half = triton.next_power_of_2(head_dim // 2)
        rows = min(triton.next_power_of_2(max(num_heads, num_kv_heads)), max(1, TILE // half))
        return cls(half, rows, triton.cdiv(num_heads, rows), triton.cdiv(num_kv_heads, rows))

    @property
    def num_warps(self) -> int:
        """Warps for 8 elements per thread of a full tile, at least one."""
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
    """Write q [B, S, H, K] and k [B, S, G, K], both contiguous, from heads [B, S, H + 2G, K] with unit stride in K."""
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
    """Write the packed gradient, contiguous; return partial sums of q_weight's and k_weight's gradients in fp32.

    They are [groups of tokens of all samples, programs, K], and empty without `heads`.
    """
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
    """(stride from cosines to sines, stride between samples or 0 if all have the same positions)."""
    if turns is None:
        return 0, 0
    return turns.stride(0), turns.stride(1) if turns.shape[1] > 1 else 0
