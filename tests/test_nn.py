"""The building blocks against plain torch, fp64 and numbers computed by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_sizes import F_, B, D, S, V, assert_agree
from random_values import drawn, filled
from torch import Tensor
from torch.nn import functional as F

from mplug_nn import MLP, NORMAL_TAIL, NORMAL_TAIL_END, NORMAL_TAIL_SLOPE, Gemm, Linear, Loss, Norm
from mplug_nn import loss as loss_module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (3,), (B, S)])
def test_a_linear_is_that_of_torch(bias: bool, lead: tuple[int, ...]) -> None:
    layer = filled(Linear(D, F_, bias))
    assert_agree(layer, layer, lambda x, w: F.linear(x, w["weight"], w.get("bias")), drawn(*lead, D))


def test_a_linear_gathers_before_the_product_and_scatters_after_it_and_adds_the_bias_last() -> None:
    layer, x = filled(Linear(D, F_)), drawn(B, D)
    layer.gather, layer.scatter = (lambda x: 2 * x), (lambda y: y + 1)
    torch.testing.assert_close(layer(x), 2 * x @ layer.weight.T + 1 + layer.bias)


def test_a_supplied_gemm_gives_the_products_that_are_needed() -> None:
    calls: list[str] = []

    def called(name: str, product: Tensor) -> Tensor:
        calls.append(name)
        return product

    layer, x, grad = filled(Linear(D, F_, bias=False)), drawn(B, D).requires_grad_(), drawn(B, F_, seed=4)
    layer.gemm = Gemm(
        lambda x, weight: called("forward", 2 * x @ weight.T),
        lambda grad_y, weight: called("dgrad", 3 * grad_y @ weight),
        lambda grad_y, x, _: called("wgrad", 5 * grad_y.T @ x),
    )
    y = layer(x)
    y.backward(grad)
    torch.testing.assert_close(y, 2 * x @ layer.weight.T)
    torch.testing.assert_close(x.grad, 3 * grad @ layer.weight)
    torch.testing.assert_close(layer.weight.grad, 5 * grad.T @ x)
    layer(drawn(B, D)).sum().backward()
    assert sorted(calls) == ["dgrad", "forward", "forward", "wgrad", "wgrad"]


def rmsnorm(x: Tensor, w: dict[str, Tensor], eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w["weight"] + w.get("bias", 0)


def layernorm(x: Tensor, w: dict[str, Tensor], eps: float) -> Tensor:
    return rmsnorm(x - x.mean(-1, keepdim=True), w, eps)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "formula"), [("layernorm", layernorm), ("rmsnorm", rmsnorm)])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_a_norm_is_its_papers_formula(kind: Any, formula: Callable[..., Tensor], bias: bool, eps: float) -> None:
    layer = filled(Norm(D, kind, eps, bias))
    assert_agree(layer, lambda x: layer(x)[0], lambda x, w: formula(x, w, eps), drawn(B, S, D))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_norm_adds_the_residual_first_and_returns_the_sum_too(kind: Any) -> None:
    layer, x, residual = filled(Norm(D, kind)), drawn(B, S, D), drawn(B, S, D, seed=1)
    normed, summed = layer(x, residual)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, layer(x + residual)[0])
    assert torch.equal(layer(x)[1], x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda h: 0.5 * h * (1 + torch.erf(h / math.sqrt(2))),  # arXiv 1606.08415, and section 2
    "gelu_tanh": lambda h: 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))),
    "swiglu": lambda h: h[..., :F_] / (1 + torch.exp(-h[..., :F_])) * h[..., F_:],
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_mlp_is_its_papers_formula(kind: Any, bias: bool) -> None:
    def formula(x: Tensor, w: dict[str, Tensor]) -> Tensor:
        h = x @ w["up.weight"].T + w.get("up.bias", 0)
        return ACTIVATIONS[kind](h) @ w["down.weight"].T + w.get("down.bias", 0)

    layer = filled(MLP(D, F_, kind, bias))
    assert_agree(layer, layer, formula, drawn(B, S, D))


def test_the_loss_and_its_gradient_are_a_sum_over_the_targets_with_their_number() -> None:
    project, hidden = filled(Linear(D, V, bias=False)), drawn(B, S, D).requires_grad_()
    labels = torch.tensor([[1, -100, 4, 0, -100], [10, 2, -100, 3, 3]])
    loss, count = Loss()(hidden, project, labels)
    logits = (hidden @ project.weight.T).detach()
    chosen = [(b, s) for b in range(B) for s in range(S) if labels[b, s] >= 0]
    expected = sum(torch.logsumexp(logits[at], 0) - logits[at][labels[at]] for at in chosen)
    assert int(count) == len(chosen) == 7
    assert count.dtype is torch.int64
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    grad = logits.softmax(-1) - F.one_hot(labels.clamp(min=0), V)
    grad[labels == -100] = 0
    torch.testing.assert_close(hidden.grad, grad @ project.weight.detach(), rtol=1e-12, atol=1e-12)


def test_a_loss_in_portions_is_the_loss_at_once_and_zero_without_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = (torch.arange(B * S).view(B, S) % V).masked_fill(torch.arange(S) % 3 == 0, -100)
    found = []
    for at_once in (loss_module.AT_ONCE, 2 * V):
        monkeypatch.setattr(loss_module, "AT_ONCE", at_once)
        hidden = drawn(B, S, D).requires_grad_()
        loss, _ = Loss()(hidden, filled(Linear(D, V, bias=False)), labels)
        (3 * loss).backward()
        found.append((loss.detach(), hidden.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-15)
    loss, count = Loss()(drawn(1, 2, D), filled(Linear(D, V, bias=False)), torch.full((1, 2), -100))
    assert (loss.item(), count.item()) == (0.0, 0)


def test_half_precision_hidden_states_are_summed_in_full_precision_without_wider_logits() -> None:
    hidden, project = drawn(B, S, D).bfloat16().requires_grad_(), filled(Linear(D, V, bias=False)).bfloat16()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        Loss()(hidden, project, torch.arange(B * S).view(B, S) % V)
    assert [tensor.dtype for tensor in kept if tensor.numel() == B * S * V] == [torch.bfloat16]
    project, hidden = filled(Linear(D, V, bias=False)).bfloat16(), drawn(64, 64, D).bfloat16()
    labels = torch.randint(V, (64, 64), generator=torch.Generator().manual_seed(2))
    loss, _ = Loss()(hidden, project, labels)
    expected = F.cross_entropy(project(hidden).double().flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


# The tail of the normal distribution as a power of two: how far GELU and its slope are off with it.


def polynomial(coefficients: tuple[float, ...], a: Tensor) -> Tensor:
    return sum((c * a**power for power, c in enumerate(coefficients)), torch.zeros_like(a))


def tail(a: Tensor) -> Tensor:
    return torch.exp2(polynomial(NORMAL_TAIL, a))


def test_gelu_is_off_by_8_6e_7_and_its_slope_which_is_its_derivative_by_2_7e_6_at_most() -> None:
    a = torch.linspace(0, 40, 200_001, dtype=torch.float64)
    leaf = a.clone().requires_grad_()
    exact, density = 0.5 * torch.special.erfc(a / math.sqrt(2)), torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    value, slope = (a * (tail(a) - exact)).abs(), tail(a) * polynomial(NORMAL_TAIL_SLOPE, a)
    error = (slope - (exact - a * density)).abs()
    assert 8.4e-7 < float(value.max()) < 8.6e-7
    assert 2.6e-6 < float(error.max()) < 2.7e-6
    assert int(error.argmax()) == 0
    for end, most in ((3, 4e-5), (4, 6e-3)):
        assert float((tail(a) / exact - 1)[a < end].abs().max()) < most, "near zero the tail is off by little of itself"
    torch.testing.assert_close(slope, torch.autograd.grad((leaf * tail(leaf)).sum(), leaf)[0], rtol=1e-12, atol=1e-15)


def test_the_tail_falls_everywhere_and_is_nothing_in_fp32_from_its_end_on() -> None:
    powers = polynomial(NORMAL_TAIL, torch.linspace(0, 1000, 200_001, dtype=torch.float64))
    assert bool((powers.diff() < 0).all())
    assert float(tail(torch.tensor(NORMAL_TAIL_END, dtype=torch.float32))) == 0
