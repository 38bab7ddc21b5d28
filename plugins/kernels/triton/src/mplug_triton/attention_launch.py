"""Launches the kernels of attention.

B batch, S queries, T keys, H query heads, G KV heads, K head dim, M queries of a tile, N keys of a tile.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mplug_triton.attention_kernels import (
    triton_attention,
    triton_attention_dk_dv,
    triton_attention_dq,
    triton_row_sums,
)
from mplug_triton.sight import Sight, ranges_of


class Tiles(NamedTuple):
    """Queries and keys of a tile, warps of a program, and loads that it has in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """The tiles of the three passes."""

    forward: Tiles
    dq: Tiles
    dk_dv: Tiles


HALF = {
    64: Plan(Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
    128: Plan(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2)),
    256: Plan(Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2)),
}
"""Padded width of a head -> tiles in formats of 16 bits."""
SINGLE = {
    64: Plan(*[Tiles(32, 32, 4, 1)] * 3),
    128: Plan(*[Tiles(32, 32, 4, 1)] * 3),
    256: Plan(*[Tiles(16, 16, 4, 1)] * 3),
}
"""The same in fp32, whose exact products are not computed by tensor cores: small tiles compile in seconds."""


class Scoring(NamedTuple):
    """The factor of the scores, and the soft cap or None."""

    scale: float
    cap: float | None


def padded(width: int) -> int:
    """The width of a tile for heads of a width: a power of two of at least 16."""
    return max(16, triton.next_power_of_2(width))


def plan_of(q: Tensor) -> Plan:
    """The tiles for heads q [., K]."""
    table = HALF if q.element_size() == 2 else SINGLE
    return table[max(64, padded(q.shape[-1]))]


def forward(
    heads: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, sight: Sight, scoring: Scoring, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, S, H, K], k and v [B, T, G, K] with consecutive K -> (output [B, S, H, K], log-sum-exp [B, H, S] in fp32).

    The log-sum-exp includes the sinks [H].
    """
    q, k, _ = heads
    (b, s, h, _), t = q.shape, k.shape[1]
    out = q.new_empty(q.shape)
    sums = q.new_empty((b, h, s), dtype=torch.float32)
    tiles = (plan or plan_of(q)).forward
    with torch.cuda.device_of(q):
        triton_attention[(triton.cdiv(s, tiles.queries) * b * h,)](
            *heads, sinks, out, sums, *sight,
            *strides(*heads), per_sample(sight.first),
            s, t, h, h // k.shape[2], scoring.scale, scoring.cap or 1.0,
            SINKS=sinks is not None, **_constants(q, tiles, scoring),
        )  # fmt: skip
    return out, sums


def backward(
    heads: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    inner: Tensor,
    sums: Tensor,
    sight: Sight,
    scoring: Scoring,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [B, S, H, K], dk and dv [B, T, G, K]), given `row_sums` and the log-sum-exp [B, H, S] over all keys."""
    q, k, v = heads
    (b, s, h, _), (_, t, g, _) = q.shape, k.shape
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    _, of_queries, of_keys = plan or plan_of(q)
    steps = (*strides(*heads, grad), per_sample(sight.first))
    sums = sums.contiguous()
    with torch.cuda.device_of(q):
        triton_attention_dq[(triton.cdiv(s, of_queries.queries) * b * h,)](
            *heads, grad, sums, inner, dq, *sight, *steps,
            s, t, h, h // g, scoring.scale, scoring.cap or 1.0, **_constants(q, of_queries, scoring),
        )  # fmt: skip
        ranges = ranges_of(sight, t, of_keys.keys)
        triton_attention_dk_dv[(triton.cdiv(t, of_keys.keys) * b * g,)](
            *heads, grad, sums, inner, dk, dv, *sight, ranges, *steps, per_sample(ranges),
            s, t, h, g, h // g, scoring.scale, scoring.cap or 1.0, **_constants(q, of_keys, scoring),
        )  # fmt: skip
    return dq, dk, dv


def row_sums(out: Tensor, grad: Tensor) -> Tensor:
    """out and grad [B, S, H, K] with consecutive K -> the inner products of their rows: [B, H, S] in fp32."""
    b, s, h, width = out.shape
    inner = out.new_empty((b, h, s), dtype=torch.float32)
    rows = 64
    with torch.cuda.device_of(out):
        triton_row_sums[(triton.cdiv(s, rows) * b * h,)](
            out, grad, inner, *strides(out, grad), s, h, K=width, WIDTH=padded(width), M=rows, num_warps=4
        )
    return inner


def _constants(q: Tensor, tiles: Tiles, scoring: Scoring) -> dict[str, object]:
    width = q.shape[-1]
    return {
        "K": width,
        "WIDTH": padded(width),
        "M": tiles.queries,
        "N": tiles.keys,
        "CAPPED": scoring.cap is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def strides(*xs: Tensor) -> list[int]:
    """The strides of all dimensions but the last, whose rows are consecutive."""
    return [stride for x in xs for stride in x.stride()[:3]]


def per_sample(x: Tensor) -> int:
    """The stride from one sample to the next; 0 if all samples share one row."""
    return x.stride(0) if len(x) > 1 else 0
