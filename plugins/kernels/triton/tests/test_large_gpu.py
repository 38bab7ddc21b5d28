"""Tensors of more than 2^31 numbers, as sequences of a million tokens have: their last rows are those of short tensors.

S sequence, D width, H query heads, G KV heads, K head dim. Attention is in test_attention_gpu.py.
"""

from collections.abc import Callable

import pytest
import torch
from mplug_triton import swiglu
from mplug_triton.norm import norm_residual
from mplug_triton.qkv import prepare_qkv
from torch import Tensor

from mplug_nn.attention import prepare_qk

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_run")]
LAST = 100
Call = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""(x [1, S, ...], positions [1, S]) -> results [1, S, ...]."""


def normed(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    weight = torch.ones(x.shape[-1], device=x.device, dtype=x.dtype)
    return norm_residual(x, None, weight, None, 1e-5, "rmsnorm")[:1]


def activated(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    return (swiglu.activation(x, None, "swiglu"),)


def prepared(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    weights = [torch.ones(x.shape[-1], device=x.device, dtype=x.dtype) for _ in range(2)]
    return prepare_qkv(x, 64, 8, positions, *weights, 1e-5, 1e4, prepare_qk)


def last_rows(call: Call, x: Tensor, positions: Tensor) -> list[Tensor]:
    """The last rows of all results, and of the gradient of x."""
    x = x.detach().requires_grad_()
    results = call(x, positions)
    (grad,) = torch.autograd.grad(results, x, [torch.ones_like(y) for y in results])
    return [y.detach()[:, -LAST:].clone() for y in (*results, grad)]


@pytest.mark.parametrize(
    ("call", "size"),
    [(normed, (1, 270_000, 8192)), (activated, (1, 80_000, 28_672)), (prepared, (1, 220_000, 80, 128))],
)
def test_the_last_rows_of_a_long_sequence_are_those_of_its_end(call: Call, size: tuple[int, ...]) -> None:
    assert torch.Size(size).numel() > 2**31
    x = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(size[1], device="cuda")[None]
    end = last_rows(call, x[:, -LAST:].clone(), positions[:, -LAST:])
    for found, right in zip(last_rows(call, x, positions), end, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-2)
