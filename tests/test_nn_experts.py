"""Routers and experts against loops over tokens, in fp64, and numbers computed by hand."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_values import drawn, filled
from routing import CHOICES, F_, KEYS, POSITIONS, B, D, E, K, S
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mplug_nn import Experts, Gating, GroupedProduct, MixtureOfExperts, Operand, Router, Weights, grouped_linear
from mplug_nn.experts import beyond_capacity, combine, dispatch
from mplug_nn.statistics import add_auxiliary

# Dispatch and combine.


def choices(num_experts: int) -> st.SearchStrategy[list[list[int]]]:
    """What some tokens choose: different experts, of which any may be dropped, and experts that nobody chooses."""
    used = st.lists(st.integers(0, num_experts - 1), min_size=1, max_size=num_experts, unique=True)
    return used.flatmap(
        lambda some: st.integers(1, len(some)).flatmap(
            lambda k: st.lists(st.permutations(some).map(lambda chosen: chosen[:k]), min_size=1, max_size=9)
        )
    )


@settings(max_examples=60)
@given(choices(5), st.data())
def test_combining_what_was_dispatched_weighs_each_token_by_its_gates(chosen: list[list[int]], data: st.DataObject):
    number = torch.tensor(chosen)
    dropped = torch.tensor(data.draw(st.lists(st.booleans(), min_size=number.numel(), max_size=number.numel())))
    number = number.masked_fill(dropped.view_as(number), 5)
    gates = drawn(*number.shape, seed=1).masked_fill(number == 5, 0).requires_grad_()
    x = drawn(len(chosen), D).requires_grad_()
    bound = data.draw(st.sampled_from([None, max(1, int((number < 5).sum()))]))
    rows, counts, route = dispatch(x, number, gates, 5, bound)
    assert len(rows) == (bound or number.numel())
    assert counts.tolist() == [int((number == expert).sum()) for expert in range(5)]
    expert = torch.repeat_interleave(torch.arange(5), counts)
    for row, own in zip(rows, expert.tolist(), strict=False):
        holders = [n for n in range(len(chosen)) if own in number[n]]
        assert any(torch.equal(row, x[n]) for n in holders), "a row of an expert is a token that chose it"
    y = combine(poisoned(rows, int(counts.sum())), gates, route)
    grad = drawn(*y.shape, seed=2)
    y.backward(grad)
    torch.testing.assert_close(y, x.detach() * gates.detach().sum(dim=1, keepdim=True))
    torch.testing.assert_close(x.grad, grad * gates.detach().sum(dim=1, keepdim=True))
    own = (grad * x.detach()).sum(dim=1, keepdim=True)
    torch.testing.assert_close(gates.grad, own.expand_as(gates) * (number < 5))


def poisoned(rows: Tensor, total: int) -> Tensor:
    """Rows from `total` on become NaN, and so do their gradients."""
    nan = lambda some: torch.cat((some[:total], torch.full_like(some[total:], math.nan)))  # noqa: E731
    rows.register_hook(nan)
    return nan(rows)


LOADS = {
    "even": [2, 2, 2],
    "nobody chooses the first and the last": [0, 6, 0],
    "padding": [1, 0, 2],
    "nobody chooses any": [0, 0, 0],
}


@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_grouped_linear_is_each_groups_own_and_adds_its_gradient_to_the_sink_in_fp32(
    counts: list[int], dtype: torch.dtype
) -> None:
    rows, weight = drawn(6, D, dtype=dtype).requires_grad_(), torch.nn.Parameter(drawn(3, F_, D, seed=1, dtype=dtype))
    grad, wide = drawn(6, F_, seed=2, dtype=dtype), torch.promote_types(dtype, torch.float32)
    main_grad, stale = torch.full((3, F_, D), 7.0, dtype=wide), torch.ones((), dtype=torch.bool)
    for _ in range(2):  # the first contribution replaces what the last step left, the second adds
        y = grouped_linear(rows, torch.tensor(counts), Weights(weight, main_grad, stale))
        y.backward(grad)
    assert weight.grad is None
    assert not stale
    start = 0
    for group, count in enumerate(counts):
        own = slice(start, start + count)
        torch.testing.assert_close(y[own], rows[own] @ weight[group].T)
        expected = 2 * grad[own].to(wide).T @ rows[own].to(wide)
        torch.testing.assert_close(main_grad[group], expected, rtol=1e-5, atol=1e-5)
        start += count
    plain = grouped_linear(rows, torch.tensor(counts), Weights.of(weight))
    plain.backward(grad)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.to(wide), main_grad / 2, rtol=2e-2, atol=2e-2)


def reference(x: Tensor, chosen: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Token by token (arXiv 2401.04088, section 2.1): sum over the chosen of gate * SwiGLU expert."""
    rows = []
    for n, token in enumerate(x):
        mixed = torch.zeros_like(token)
        for expert, gate in zip(chosen[n].tolist(), gates[n], strict=True):
            if expert < len(up):
                gate_part, up_part = (up[expert] @ token).chunk(2)
                mixed = mixed + gate * (down[expert] @ (gate_part * torch.sigmoid(gate_part) * up_part))
        rows.append(mixed)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "chosen", [[[0, 1], [2, 0], [1, 2]], [[1, 1], [1, 1], [1, 1]], [[0, 3], [3, 3], [2, 3]]], ids=str
)
def test_experts_are_their_papers_formula_with_all_gradients(chosen: list[list[int]]) -> None:
    experts, number = filled(Experts(D, F_, 3, "swiglu")), torch.tensor(chosen)
    tensors = drawn(3, D), drawn(3, 2, seed=1).masked_fill(number == 3, 0), experts.up, experts.down
    ours, theirs = ([t.detach().clone().requires_grad_() for t in tensors] for _ in range(2))
    experts.up.data, experts.down.data = ours[2].data, ours[3].data
    y, expected = experts(ours[0], number, ours[1]), reference(theirs[0], number, *theirs[1:])
    torch.testing.assert_close(y, expected)
    grad = drawn(*y.shape, seed=3)
    y.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)
    torch.testing.assert_close(ours[1].grad, theirs[1].grad.masked_fill(number == 3, 0))
    torch.testing.assert_close(experts.up.grad, theirs[2].grad)
    torch.testing.assert_close(experts.down.grad, theirs[3].grad)


class Doubling(GroupedProduct):
    """Twice the product, by copies of the weight."""

    def cast(self, weight: Tensor, buffers: Any) -> tuple[Tensor, ...]:
        return (2 * weight,)

    def forward(self, rows: Tensor, weight: Operand, *rest: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        return super().forward(rows, Operand(weight.casts[0]), *rest)


def test_experts_multiply_by_the_product_in_their_slot_and_by_its_copies() -> None:
    experts = filled(Experts(D, F_, 3, "gelu"))
    given = drawn(3, D), torch.tensor([[0], [2], [0]]), torch.ones(3, 1, dtype=torch.float64)
    with torch.no_grad():
        expected = experts(*given)
        experts.down.div_(2)
        experts.up.div_(2)
        experts.product = Doubling()
        torch.testing.assert_close(experts(*given), expected)
        experts.up_casts, experts.down_casts = experts.cast("up"), experts.cast("down")
        for weight in (experts.up, experts.down):
            weight.zero_()
        torch.testing.assert_close(experts(*given), expected)


@pytest.mark.parametrize(("dropping", "kept"), [("position", {0, 1}), ("probability", {1, 3})])
def test_a_full_expert_keeps_the_first_tokens_or_those_with_the_highest_gates(dropping: Any, kept: set[int]) -> None:
    chosen, gates = torch.tensor([[0], [0], [0], [0]]), torch.tensor([[0.2], [0.4], [0.1], [0.3]])
    dropped = beyond_capacity(chosen, gates, 2, 1.0, dropping)  # 4 tokens, 2 experts: room for 2
    assert {n for n in range(4) if not dropped[n]} == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_drops_no_choice(dtype: torch.dtype) -> None:
    """Equal tokens, such as the first ones of two documents, have gates that differ in their last bits."""
    least = torch.finfo(dtype).eps
    gates = torch.tensor([[0.3], [0.6], [0.6 + least]], dtype=dtype)
    assert gates[2] > gates[1]
    dropped = beyond_capacity(torch.zeros(3, 1, dtype=torch.long), gates, 1, 1 / 3, "probability")  # room for 1
    assert dropped.flatten().tolist() == [True, False, True]


@settings(max_examples=60)
@given(choices(5), st.sampled_from(["position", "probability"]), st.sampled_from([0.3, 1.0, 1.25, 5.0]))
def test_no_expert_takes_more_than_its_room_and_none_drops_with_room_left(
    chosen: list[list[int]], dropping: Any, factor: float
) -> None:
    number = torch.tensor(chosen)
    left = number.masked_fill(beyond_capacity(number, drawn(*number.shape).abs() + 1, 5, factor, dropping), 5)
    room = math.ceil(factor * number.numel() / 5)
    for expert in range(5):
        assert int((left == expert).sum()) == min(room, int((number == expert).sum()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_pass_counts_once_and_gives_the_same_gradients(reentrant: bool) -> None:
    found = []
    for recompute in (False, True):
        router = Router(D, CHOICES[0], balance="sequence", balance_coefficient=0.1, jitter=0.1)
        moe = filled(MixtureOfExperts(router, D, F_, "swiglu"))
        x = drawn(B, S, D).requires_grad_()
        run = (lambda *a, m=moe: checkpoint(m, *a, use_reentrant=reentrant)) if recompute else moe
        run(x, POSITIONS, KEYS, None).square().sum().backward()
        found.append((router.load.clone(), router.losses.clone(), *(p.grad for p in moe.parameters()), x.grad))
    assert float(found[0][0].sum()) == B * S * K
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_serve_every_token_beside_the_chosen_ones(gated: bool) -> None:
    moe = filled(MixtureOfExperts(Router(D, CHOICES[0]), D, F_, "swiglu", shared_ffn_dim=4, shared_gate=gated)).eval()
    x = drawn(B, S, D)
    chosen, gates = (part.flatten(0, 1) for part in moe.router(x, POSITIONS, KEYS))
    routed = reference(x.flatten(0, 1), chosen, gates, moe.experts.up, moe.experts.down).view_as(x)
    gate, up = F.linear(x, moe.shared.up.weight).chunk(2, -1)
    shared = F.linear(F.silu(gate) * up, moe.shared.down.weight)
    weight = torch.sigmoid(x @ moe.shared_gate.weight[0])[..., None] if gated else 1.0
    torch.testing.assert_close(moe(x, POSITIONS, KEYS, None), routed + weight * shared)


@pytest.mark.parametrize("bias", [False, True])
def test_latent_experts_work_between_two_shared_projections(bias: bool) -> None:
    named: dict[str, Any] = {"shared_ffn_dim": 4, "latent_dim": 3, "bias": bias}
    moe = filled(MixtureOfExperts(Router(D, CHOICES[0]), D, F_, "relu2", **named)).eval()
    x = drawn(B, S, D)
    chosen, gates = moe.router(x, POSITIONS, KEYS)
    right = torch.zeros_like(x)
    for b, s in ((b, s) for b in range(B) for s in range(S)):
        latent = moe.latent_down.weight @ x[b, s]
        total = torch.zeros(3, dtype=x.dtype)
        for expert, gate in zip(chosen[b, s].tolist(), gates[b, s], strict=True):
            hidden = moe.experts.up[expert] @ latent + (moe.experts.up_bias[expert] if bias else 0)
            y = moe.experts.down[expert] @ hidden.relu().square() + (moe.down_bias[expert] if bias else 0)
            total = total + gate * y
        right[b, s] = moe.latent_up.weight @ total
    shared = F.linear(F.linear(x, moe.shared.up.weight).relu().square(), moe.shared.down.weight)
    torch.testing.assert_close(moe(x, POSITIONS, KEYS, None), right + shared)


def test_a_token_whose_choices_were_all_dropped_keeps_the_shared_part_only() -> None:
    router = Router(D, Gating(E, 1))
    moe = filled(MixtureOfExperts(router, D, F_, "gelu", capacity_factor=0.2, dropping="position")).eval()
    with torch.no_grad():
        router.weight.zero_()
        router.weight[2] = 1.0
    y = moe(drawn(B, S, D).abs(), POSITIONS, KEYS, None).flatten(0, 1)  # all choose expert 2, which has room for one
    assert y[0].any()
    assert not y[1:].any()


def test_the_gradient_of_an_auxiliary_loss_begins_with_its_scale() -> None:
    """A run with a loss scale has it in every gradient."""
    x, loss = torch.ones(3, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    add_auxiliary(x, loss, torch.tensor(8.0)).backward(torch.tensor([1.0, 2.0, 3.0]))
    assert (loss.grad, x.grad.tolist()) == (torch.tensor(8.0), [1.0, 2.0, 3.0])
