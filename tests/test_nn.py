"""The building blocks against plain torch, fp64 and numbers computed by hand."""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest
import torch
from plain_attention import attend
from random_values import drawn, filled
from torch import Tensor, nn
from torch.nn import functional as F

from mplug.tensors.random import key_of, mix, normal, sample_keys, uniform
from mplug_nn import (
    MLP,
    NORMAL_TAIL,
    NORMAL_TAIL_END,
    NORMAL_TAIL_SLOPE,
    Attention,
    DotProductAttention,
    Dropout,
    Gemm,
    Linear,
    Loss,
    Norm,
)
from mplug_nn import loss as loss_module
from mplug_nn.attention import rotate

B, S, D, F_, V = 2, 5, 8, 12, 11
KEYS = torch.tensor([3, 4])
POSITIONS = torch.arange(S)[None]


Formula = Callable[[Tensor, dict[str, Tensor]], Tensor]


def assert_agree(
    module: nn.Module, run: Callable[[Tensor], Tensor], reference: Formula, x: Tensor, tolerance: float = 1e-12
) -> None:
    """Values and all gradients of `run` equal those of `reference`, for a random gradient of the output."""
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    y, expected = run(ours), reference(theirs, weights)
    for one in (y, expected):
        one.backward(drawn(*y.shape, seed=9))
    found = {"output": y, "input": ours.grad, **{name: p.grad for name, p in module.named_parameters()}}
    right = {"output": expected, "input": theirs.grad, **{name: p.grad for name, p in weights.items()}}
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)


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


# Keyed random numbers.

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def splitmix64(seed: int, number: int) -> int:
    """The generator of Steele, Lea and Flood (OOPSLA 2014), in Python's integers."""
    z = (seed + number * GOLDEN) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_mix_is_splitmix64_of_the_paper_and_uniform_numbers_are_its_upper_24_bits(key: int) -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # its first outputs from seed 0
    assert [splitmix64(0, number) for number in (1, 2, 3)] == published
    states = torch.tensor([signed(number * GOLDEN & MASK) for number in (1, 2, 3)])
    assert mix(states).tolist() == [signed(bits) for bits in published]
    counters = torch.tensor([0, 1, 2, 1000, 2**62, -5])
    expected = [(splitmix64(key, number) >> 40) / 2**24 for number in counters.tolist()]
    found = uniform(key, counters)
    assert found.dtype is torch.float32
    assert found.tolist() == expected


@pytest.mark.parametrize("key", [0, key_of(1234, "parameter", "blocks.0.mlp.up.weight")])
def test_normal_numbers_are_the_quantiles_of_52_bits(key: int) -> None:
    counters = torch.arange(2000)
    quantile = NormalDist().inv_cdf
    expected = [quantile(((splitmix64(key, number) >> 12) + 0.5) / 2**52) for number in counters.tolist()]
    found = normal(key, counters)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("upper", [0, 1, 2, 2**51 - 1, 2**51, 2**52 - 3, 2**52 - 2, 2**52 - 1])
def test_normal_numbers_are_finite_at_both_ends_and_centred(upper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.tensor([signed(upper << 12), signed((2**52 - 1 - upper) << 12)])
    monkeypatch.setattr("mplug.tensors.random.mix", lambda _: bits)
    low, high = normal(5, torch.zeros(2, dtype=torch.int64)).tolist()
    assert abs(low) < 8.5
    assert low == pytest.approx(-high, rel=0.02, abs=1e-15)


def test_keys_tell_words_and_samples_apart_and_depend_on_nothing_else() -> None:
    words = [(1, "a"), (1, "b"), (2, "a"), ("a", 1), ("ab", "c"), ("a", "bc"), ()]
    keys = [key_of(*one) for one in words]
    assert len(set(keys)) == len(keys)
    assert key_of(1234, "step", 7) == key_of(1234, "step", 7)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    ids = torch.arange(1000)
    keys = sample_keys(1, 2, ids)
    assert torch.equal(keys[ids.flip(0)], sample_keys(1, 2, ids.flip(0)))
    assert torch.equal(keys[5:9], sample_keys(1, 2, ids[5:9]))
    together = torch.cat((keys, sample_keys(1, 3, ids), sample_keys(2, 2, ids)))
    assert len(together.unique()) == 3000


def dropout(probability: float) -> Dropout:
    layer = Dropout(probability)
    layer.site.fill_(7)
    return layer.train()


MANY = torch.arange(20) * 977 - 5000


def test_dropout_keeps_the_expected_share_and_scales_it_up() -> None:
    y = dropout(0.25)(torch.ones(20, 64, 128), MANY, torch.arange(64)[None])
    n = y.numel()
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float((y > 0).double().mean()) == pytest.approx(0.75, abs=5 * math.sqrt(0.1875 / n))
    for dims in ((0, 1), (0, 2), (1, 2)):  # no feature, position or sample is treated apart
        share = (y > 0).double().mean(dims)
        assert float((share - 0.75).abs().max()) < 6 * math.sqrt(0.1875 / (n / len(share)))


def test_a_mask_depends_on_sample_and_position_alone_and_gradients_pass_where_values_did() -> None:
    layer, positions, x = dropout(0.5), torch.arange(8)[None], torch.ones(20, 8, 16)
    whole, zigzag = layer(x, MANY, positions), torch.tensor([[6, 7, 0, 1]])
    assert torch.equal(layer(x[:, :4], MANY, zigzag), whole[:, zigzag[0]])
    assert torch.equal(layer(x, MANY, positions.expand(20, 8)), whole)
    layer, x = dropout(0.5), drawn(2, S, D).requires_grad_()
    y = layer(x, KEYS, POSITIONS)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0).double() * 2)


def test_attention_dropout_does_not_depend_on_the_batch_or_on_what_follows() -> None:
    q, k, v = (drawn(6, S, 2, 4, seed=seed) for seed in range(3))
    keys = torch.arange(6) * 31

    def part(rows: slice, length: int) -> Tensor:
        cut = [x[rows, :length] for x in (q, k, v)]
        return attend(*cut, scale=0.5, dropout=0.5, keys=keys[rows])

    whole = part(slice(None), S)
    torch.testing.assert_close(part(slice(2, 4), S), whole[2:4])
    torch.testing.assert_close(part(slice(None), 3), whole[:, :3])


def test_attention_dropout_drops_weights_and_is_right_on_average() -> None:
    n, p = 4000, 0.3
    q, k = torch.zeros(n, 2, 2, 4), torch.zeros(n, 2, 2, 4)
    v = torch.eye(2, 4)[None, :, None].expand(n, 2, 2, 4)  # a weight is a coordinate of the result
    weights = attend(q, k, v, scale=1.0, dropout=p, keys=mix(torch.arange(n)))
    last = weights[:, 1, :, :2].double()
    assert last.unique().tolist() == pytest.approx([0.0, 0.5 / 0.7])
    assert float((last > 0).double().mean()) == pytest.approx(1 - p, abs=5 * math.sqrt(p * (1 - p) / last.numel()))
    heads = ((last[:, 0] > 0).double() - 0.7) * ((last[:, 1] > 0).double() - 0.7)
    assert abs(float(heads.mean()) / 0.21) < 5 / math.sqrt(heads.numel())


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
