"""Attention blocks against their formulas, and rotary positions."""

import pytest
import torch
from block_sizes import KEYS, POSITIONS, B, D, S, assert_agree
from random_values import drawn, filled
from torch import Tensor

from mplug_nn import Attention, DotProductAttention
from mplug_nn.attention import rotate


def attend_by_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention, one query of one head of one sample at a time."""
    batch, length, heads, _ = q.shape
    shared = heads // k.shape[2]
    rows = []
    for b in range(batch):
        for s in range(length):
            for h in range(heads):
                scores = scale * k[b, : s + 1, h // shared] @ q[b, s, h]
                weights = torch.exp(scores - scores.max())
                rows.append(weights / weights.sum() @ v[b, : s + 1, h // shared])
    return torch.stack(rows).view(batch, length, heads, -1)


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoFormer as complex numbers: pair i turns by position * theta^(-2i/K)."""
    half = x.shape[-1] // 2
    turns = positions.double()[..., None] * theta ** (-2 * torch.arange(half).double() / x.shape[-1])
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * turns)[:, :, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("theta", [None, 10000.0])
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize(("groups", "bias"), [(4, True), (2, False), (1, True)])
def test_an_attention_block_is_its_formula(groups: int, bias: bool, qk_norm: bool, theta: float | None) -> None:
    layer = filled(Attention(D, 4, groups, 6, bias=bias, qk_norm=qk_norm, theta=theta, eps=1e-3))
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])

    def reference(x: Tensor, w: dict[str, Tensor]) -> Tensor:
        rows = (x @ w["qkv.weight"].T + w.get("qkv.bias", 0)).unflatten(-1, (4 + 2 * groups, 6))
        q, k, v = rows[:, :, :4], rows[:, :, 4 : 4 + groups], rows[:, :, 4 + groups :]
        if qk_norm:
            q, k = rms(q, w["q_norm"], 1e-3), rms(k, w["k_norm"], 1e-3)
        if theta:
            q, k = rotated(q, positions, theta), rotated(k, positions, theta)
        mixed = attend_by_rows(q, k, v, 6**-0.5).flatten(-2)
        return mixed @ w["out.weight"].T + w.get("out.bias", 0)

    tolerance = 1e-10 if theta is None else 2e-5  # rotary angles are fp32
    assert_agree(layer, lambda x: layer(x, positions, KEYS), reference, drawn(B, S, D), tolerance)


def test_attention_between_projections_is_that_of_the_whole() -> None:
    layer = filled(Attention(D, 4, 2, 6, bias=True, qk_norm=True, theta=100.0, eps=1e-3))
    between = filled(DotProductAttention(2, 2, 6, qk_norm=True, theta=100.0, eps=1e-3))
    between.load_state_dict({name: layer.state_dict()[name] for name in ("q_norm", "k_norm")})
    x = drawn(B, S, D)
    q, k, v = layer.qkv(x).unflatten(-1, (-1, 6)).split((4, 2, 2), dim=2)
    mixed = between.attend(q, k, v, POSITIONS, KEYS)
    assert torch.equal(layer.out(mixed.flatten(-2)), layer(x, POSITIONS, KEYS))


def test_packed_heads_are_prepared_by_whatever_fills_the_narrower_slot() -> None:
    layer = filled(Attention(D, 4, 2, 6, bias=True, qk_norm=True, theta=100.0))
    x, plain = drawn(B, S, D), layer.prepare_qk
    before = layer(x, POSITIONS, KEYS)
    layer.prepare_qk = lambda q, k, *rest: plain(2 * q, 2 * k, *rest)  # QK-norm undoes it, up to its eps
    torch.testing.assert_close(layer(x, POSITIONS, KEYS), before, rtol=1e-4, atol=1e-4)
    layer.prepare_qk = lambda q, k, *rest: tuple(2 * y for y in plain(q, k, *rest))
    sharper = layer(x, POSITIONS, KEYS)
    assert not torch.allclose(sharper, before, rtol=1e-2)
    layer.prepare_qk, layer.scale = plain, 4 * layer.scale
    torch.testing.assert_close(layer(x, POSITIONS, KEYS), sharper, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "position", "error"),
    [(torch.float64, 100_000, 1e-9), (torch.float32, 100_000, 1e-2), (torch.bfloat16, 1000, 0.03)],
)
def test_positions_far_away_keep_their_precision(dtype: torch.dtype, position: int, error: float) -> None:
    x, far = drawn(1, 1, 1, 4), torch.tensor([[position]])
    y = rotate(x.to(dtype), far, 10000.0)
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), rotated(x, far, 10000.0), rtol=error, atol=error)
