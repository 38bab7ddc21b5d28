"""The reference kernel: the compositions of `mplug_nn`, computed in fp32 whatever comes in, and rounded once."""

from typing import Any

import pytest
import torch
from mplug_reference import Reference
from torch import Tensor, nn
from torch.nn import functional as F

from mplug import Offer
from mplug_nn import AttentionInputs, AttentionSpec
from mplug_testing import KernelSuite

B, S, H, K, D, V = 2, 6, 2, 8, 16, 11
SLOTS = [
    "Attention.core",
    "Attention.prepare_qk",
    "Loss.cross_entropy",
    "MLP.activation",
    "Norm.norm_residual",
]


def offers() -> list[Offer]:
    return Reference(Reference.Config()).offer()


def call(slot: str, *inputs: Any, **named: Any) -> Any:
    (supplier,) = (offer.suppliers[slot] for offer in offers() if slot in offer.suppliers)
    return supplier(*inputs, **named)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_each_slot_is_an_offer_of_its_own() -> None:
    assert sorted(slot for offer in offers() for slot in offer.suppliers) == SLOTS
    assert all(len(offer.suppliers) == 1 for offer in offers())


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    scores = scale * torch.einsum("bshk,bthk->bhst", q, k)
    past = torch.arange(S)[:, None] >= torch.arange(S)
    return torch.einsum("bhst,bthk->bshk", scores.masked_fill(~past, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_is_computed_in_fp32_and_returned_in_the_dtype_that_came_in(dtype: torch.dtype) -> None:
    q, k, v = (drawn(B, S, H, K, seed=seed, dtype=dtype) for seed in range(3))
    y = call("Attention.core", q, k, v, AttentionSpec(0.3, K, K), AttentionInputs())
    assert y.dtype is dtype
    exact = attend(q.double(), k.double(), v.double(), 0.3)
    # Computed in fp32, then rounded once: half a unit in the last place of the result.
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps / 2 * 1.1, atol=2e-6)


def test_gradients_are_computed_in_fp32_too() -> None:
    q, k, v = (drawn(B, S, H, K, seed=seed).requires_grad_() for seed in range(3))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    grad = drawn(B, S, H, K, seed=5)
    call("Attention.core", q, k, v, AttentionSpec(0.3, K, K), AttentionInputs()).backward(grad)
    attend(*exact, 0.3).backward(grad.double())
    for ours, right in zip((q, k, v), exact, strict=True):
        assert ours.grad.dtype is torch.bfloat16
        torch.testing.assert_close(ours.grad.double(), right.grad, rtol=2**-8 * 1.1, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_positions_are_rotated_and_norms_taken_in_fp32(dtype: torch.dtype) -> None:
    q, k = drawn(B, S, H, K, dtype=dtype), drawn(B, S, 1, K, seed=1, dtype=dtype)
    weight = drawn(K, seed=2, dtype=dtype)
    found = call("Attention.prepare_qk", q, k, torch.arange(S)[None], weight, weight, 1e-5, 10000.0)
    turns = torch.arange(S).double()[:, None] * 10000.0 ** (-2 * torch.arange(K // 2).double() / K)
    for ours, x in zip(found, (q, k), strict=True):
        normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        pairs = torch.complex(normed[..., : K // 2], normed[..., K // 2 :]) * torch.exp(1j * turns)[None, :, None]
        assert ours.dtype is dtype
        exact = torch.cat((pairs.real, pairs.imag), -1)
        torch.testing.assert_close(ours.double(), exact, rtol=torch.finfo(dtype).eps / 2 * 1.1, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_add_the_residual_in_fp32(kind: str, dtype: torch.dtype) -> None:
    x, residual, weight = drawn(B, D, dtype=dtype), drawn(B, D, seed=1, dtype=dtype), drawn(D, seed=2, dtype=dtype)
    normed, summed = call("Norm.norm_residual", x, residual, weight, None, 1e-5, kind)
    total = x.double() + residual.double()
    centred = total - total.mean(-1, keepdim=True) if kind == "layernorm" else total
    exact = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    half_a_unit = torch.finfo(dtype).eps / 2 * 1.1
    assert normed.dtype is summed.dtype is dtype
    torch.testing.assert_close(normed.double(), exact, rtol=half_a_unit, atol=2e-6)
    torch.testing.assert_close(summed.double(), total, rtol=half_a_unit, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_are_computed_in_fp32(dtype: torch.dtype) -> None:
    x, bias = drawn(B, 2 * D, dtype=dtype), drawn(2 * D, seed=1, dtype=dtype)
    y = call("MLP.activation", x, bias, "swiglu")
    gate, up = (x.double() + bias.double()).chunk(2, -1)
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), gate * gate.sigmoid() * up, rtol=torch.finfo(dtype).eps / 2 * 1.1, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_is_an_fp32_sum_whatever_the_hidden_states_are(dtype: torch.dtype) -> None:
    project = nn.Linear(D, V, bias=False).to(dtype)
    nn.init.normal_(project.weight, generator=torch.Generator().manual_seed(3))
    hidden, labels = drawn(8, 64, D, dtype=dtype), torch.randint(V, (8, 64), generator=torch.Generator().manual_seed(1))
    labels[0, :5] = -100
    loss, count = call("Loss.cross_entropy", hidden, project, labels)
    logits = hidden.double() @ project.weight.detach().double().T
    exact = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    assert int(count) == 8 * 64 - 5
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.detach().double(), exact, rtol=1e-3, atol=0)


class TestReference(KernelSuite):
    plugin = "reference"
