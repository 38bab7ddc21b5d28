"""Routers and experts against loops over tokens, in fp64, and numbers computed by hand."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_values import drawn, filled
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mplug_nn import (
    Experts,
    Gating,
    GroupedProduct,
    Jitter,
    MixtureOfExperts,
    Operand,
    Router,
    Weights,
    grouped_linear,
)
from mplug_nn.experts import beyond_capacity, combine, dispatch
from mplug_nn.router import Balance
from mplug_nn.statistics import add_auxiliary

B, S, D, F_, E, K = 2, 5, 8, 12, 6, 2
POSITIONS, KEYS = torch.arange(S)[None], torch.tensor([3, 4])


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


# The router's choice.


def chosen_by_loops(scores: list[float], choice: Gating) -> list[int]:
    size = choice.num_experts // choice.num_groups
    groups = [scores[g * size : (g + 1) * size] for g in range(choice.num_groups)]
    worth = [sum(sorted(group)[-2:]) for group in groups]
    open_groups = sorted(range(choice.num_groups), key=lambda g: -worth[g])[: choice.top_groups]
    allowed = [e for e in range(choice.num_experts) if e // size in open_groups]
    return sorted(allowed, key=lambda e: -scores[e])[: choice.top_k]


CHOICES = [
    Gating(E, K),
    Gating(E, 1),
    Gating(E, K, normalize=False),
    Gating(E, 3, "sigmoid", scale=2.5),
    Gating(E, 2, "sigmoid", num_groups=3, top_groups=1),
    Gating(E, 3, "softmax", num_groups=3, top_groups=2),
    Gating(E, 2, "sigmoid", num_groups=6, top_groups=4),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_router_chooses_the_best_experts_and_gives_them_gates(choice: Gating, biased: bool) -> None:
    router = filled(Router(D, choice, bias_rate=1e-3 if biased else 0.0)).eval()
    if biased:
        router.bias.copy_(drawn(E, seed=5))
    x = drawn(B, S, D)
    chosen, gates = router(x, POSITIONS, KEYS)
    assert chosen.shape == gates.shape == (B, S, choice.top_k)
    for b in range(B):
        for s in range(S):
            logits = router.weight.detach() @ x[b, s]
            scores = logits.softmax(0) if choice.score == "softmax" else logits.sigmoid()
            judged = scores + router.bias if biased else scores
            expected = chosen_by_loops(judged.tolist(), choice)
            assert chosen[b, s].tolist() == expected
            weights = scores[expected]
            if choice.normalize:
                weights = weights / weights.sum()
            torch.testing.assert_close(gates[b, s].detach(), weights * choice.scale)


def transported_by_loops(logits: Tensor) -> Tensor:
    """exp(logits) [S, E], scaled in turn: rows to sum 1 / S, columns to sum 1 / E, until nothing changes."""
    shares, before = logits.exp(), torch.zeros(())
    while bool((shares - before).abs().max() > 1e-12):
        before = shares
        shares = shares / shares.sum(dim=1, keepdim=True) / len(shares)
        shares = shares / shares.sum(dim=0) / shares.shape[1]
    return shares


@pytest.mark.parametrize("score", ["sinkhorn", "sinkhorn_sigmoid"])
def test_sinkhorn_chooses_by_the_balanced_matrix_of_each_sequence_in_training(score: str) -> None:
    router, x = filled(Router(D, Gating(E, K, score, normalize=False))), drawn(B, 40, D)
    positions = torch.arange(40)[None]
    logits = F.linear(x, router.weight.detach())
    chosen, gates = router.train()(x, positions, KEYS)
    scores = logits.softmax(-1) if score == "sinkhorn" else logits.sigmoid()
    for b in range(B):
        shares = transported_by_loops(logits[b])
        assert torch.equal(chosen[b], shares.topk(K, dim=-1).indices)
    torch.testing.assert_close(gates.detach(), scores.gather(-1, chosen))
    plain = logits.topk(K, dim=-1).indices
    assert router.load.max() < plain.flatten().bincount(minlength=E).max(), "the load is more even"
    assert torch.equal(router.eval()(x, positions, KEYS)[0], plain)


def test_a_bias_of_the_choice_beside_sinkhorn_is_refused() -> None:
    with pytest.raises(ValueError, match="'sinkhorn' chooses experts by values that balance their load, and a bias"):
        Router(D, Gating(E, K, "sinkhorn"), bias_rate=1e-3)


def test_logits_are_fp32_though_weights_are_bf16_and_so_is_the_gradient_in_the_sink() -> None:
    router = filled(Router(D, Gating(E, K)), torch.bfloat16)
    router.weight.main_grad = torch.zeros(E, D)
    router.weight.main_grad_stale = torch.ones((), dtype=torch.bool)
    x = drawn(B, S, D, dtype=torch.bfloat16).requires_grad_()
    _, gates = router(x, POSITIONS, KEYS)
    assert gates.dtype == torch.float32
    gates.square().sum().backward()
    wide, weight = x.detach().double(), router.weight.detach().double().requires_grad_()
    best = (wide @ weight.T).softmax(-1).topk(K).values
    torch.testing.assert_close(gates.double(), best / best.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)
    (best / best.sum(-1, keepdim=True)).square().sum().backward()
    assert router.weight.grad is None
    torch.testing.assert_close(router.weight.main_grad.double(), weight.grad, rtol=1e-4, atol=1e-5)


def test_jitter_is_noise_of_its_width_in_training_and_a_function_of_the_position() -> None:
    jitter, x = Jitter(0.25), torch.ones(2, 4000, 3)
    noise = jitter(x, KEYS, torch.arange(4000)[None])
    assert float(noise.min()) == pytest.approx(0.75, abs=1e-3)
    assert float(noise.max()) == pytest.approx(1.25, abs=1e-3)
    assert float(noise.mean()) == pytest.approx(1, abs=5e-3)
    assert not torch.equal(noise[0], noise[1])
    later = jitter(x[:, 7:], KEYS, torch.arange(7, 4000)[None])
    assert torch.equal(later, noise[:, 7:])
    assert torch.equal(jitter.eval()(x, KEYS, torch.arange(4000)[None]), x)


# The auxiliary losses.


def balanced_by_loops(router: Router, x: Tensor, balance: Balance) -> Tensor:
    """alpha E sum_n sum_i f_i p_ni + beta sum_n z_n², with every f and p written out."""
    choice, total = router.gating, x.new_zeros(())
    logits = torch.einsum("bsd,ed->bse", x, router.weight)
    scores = logits.softmax(-1) if choice.score == "softmax" else logits.sigmoid()
    p = scores / scores.sum(-1, keepdim=True)
    picks = [[chosen_by_loops(scores[b, s].tolist(), choice) for s in range(S)] for b in range(B)]
    for b in range(B):
        samples = [b] if balance == "sequence" else range(B)
        everyone = [e for sample in samples for token in picks[sample] for e in token]
        for e in range(E):
            f = everyone.count(e) / len(everyone) if balance != "global_batch" else router.last_load[e].item() / 60
            total = total + router.balance_coefficient * E * f * p[b, :, e].sum()
    return total + router.z_coefficient * logits.exp().sum(-1).log().square().sum()


@pytest.mark.parametrize("choice", [CHOICES[0], CHOICES[3]], ids=str)
@pytest.mark.parametrize("balance", ["micro_batch", "sequence", "global_batch"])
def test_auxiliary_losses_take_part_as_sums_beside_the_models_loss(choice: Gating, balance: Balance) -> None:
    router = filled(Router(D, choice, balance=balance, balance_coefficient=0.3, z_coefficient=0.2))
    if balance == "global_batch":
        router.last_load.copy_(torch.tensor([30.0, 10, 5, 5, 10, 0]))
    ours, theirs = (drawn(B, S, D).requires_grad_() for _ in range(2))
    _, gates = router(ours, POSITIONS, KEYS)
    torch.autograd.backward(gates, torch.zeros_like(gates))  # nothing comes from the model's own loss
    found = router.weight.grad.clone()
    router.weight.grad = None
    expected = balanced_by_loops(router, theirs, balance)
    expected.backward()
    torch.testing.assert_close(found, router.weight.grad)
    torch.testing.assert_close(ours.grad, theirs.grad)
    uneven, z = router.losses.tolist()
    assert 0.3 * uneven + 0.2 * z == pytest.approx(float(expected.detach()), rel=1e-6)
    assert router.load.sum() == B * S * choice.top_k


def test_the_first_global_batch_knows_no_shares_and_pulls_nowhere() -> None:
    router = filled(Router(D, CHOICES[0], balance="global_batch", balance_coefficient=1.0))
    _, gates = router(drawn(B, S, D), POSITIONS, KEYS)
    gates.backward(torch.zeros_like(gates))
    torch.testing.assert_close(router.weight.grad, torch.zeros_like(router.weight), atol=1e-6, rtol=0)
    assert float(router.losses[0]) == pytest.approx(B * S)  # E sum_i p_i / E, a token


def test_sums_over_other_ranks_are_asked_for_by_the_axes_that_the_loss_covers() -> None:
    asked = list[tuple[str, ...]]()
    for balance in ("none", "global_batch", "sequence", "micro_batch"):
        router = filled(Router(D, CHOICES[0], balance=balance, balance_coefficient=0.1))
        router.summed = lambda values, over: asked.append(over) or values
        router(drawn(B, S, D), POSITIONS, KEYS)
        router.eval()(drawn(B, S, D), POSITIONS, KEYS)
    assert asked == [("sequence",), ("sequence",)]


def test_evaluation_adds_no_loss_and_counts_nothing() -> None:
    router = filled(Router(D, CHOICES[0], balance="sequence", balance_coefficient=1.0, z_coefficient=1.0)).eval()
    _, gates = router(drawn(B, S, D), POSITIONS, KEYS)
    torch.autograd.backward(gates, torch.zeros_like(gates))
    assert not router.weight.grad.any()
    assert not router.load.any()
    assert not router.losses.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_pass_counts_once_and_gives_the_same_gradients(reentrant: bool) -> None:
    found = []
    for recompute in (False, True):
        router = Router(D, CHOICES[0], balance="sequence", balance_coefficient=0.1, jitter=0.1)
        moe = filled(MixtureOfExperts(router, D, F_, "swiglu"))
        x = drawn(B, S, D).requires_grad_()
        run = (lambda *a, m=moe: checkpoint(m, *a, use_reentrant=reentrant)) if recompute else moe
        run(x, POSITIONS, KEYS).square().sum().backward()
        found.append((router.load.clone(), router.losses.clone(), *(p.grad for p in moe.parameters()), x.grad))
    assert float(found[0][0].sum()) == B * S * K
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_step_moves_the_bias_towards_experts_below_the_mean_load_and_keeps_the_load_unless_skipped() -> None:
    router = Router(D, Gating(4, 2), bias_rate=0.25, balance="global_batch", balance_coefficient=0.1)
    for load, skip in (([7.0, 3, 5, 5], 0.0), ([0.0] * 4, 1.0)):
        router.load.copy_(torch.tensor(load))
        router.step_ended(torch.tensor(skip))
        assert router.bias.tolist() == [-0.25, 0.25, 0, 0]
        assert router.last_load.tolist() == [7, 3, 5, 5]


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_serve_every_token_beside_the_chosen_ones(gated: bool) -> None:
    moe = filled(MixtureOfExperts(Router(D, CHOICES[0]), D, F_, "swiglu", shared_ffn_dim=4, shared_gate=gated)).eval()
    x = drawn(B, S, D)
    chosen, gates = (part.flatten(0, 1) for part in moe.router(x, POSITIONS, KEYS))
    routed = reference(x.flatten(0, 1), chosen, gates, moe.experts.up, moe.experts.down).view_as(x)
    gate, up = F.linear(x, moe.shared.up.weight).chunk(2, -1)
    shared = F.linear(F.silu(gate) * up, moe.shared.down.weight)
    weight = torch.sigmoid(x @ moe.shared_gate.weight[0])[..., None] if gated else 1.0
    torch.testing.assert_close(moe(x, POSITIONS, KEYS), routed + weight * shared)


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
    torch.testing.assert_close(moe(x, POSITIONS, KEYS), right + shared)


def test_a_token_whose_choices_were_all_dropped_keeps_the_shared_part_only() -> None:
    router = Router(D, Gating(E, 1))
    moe = filled(MixtureOfExperts(router, D, F_, "gelu", capacity_factor=0.2, dropping="position")).eval()
    with torch.no_grad():
        router.weight.zero_()
        router.weight[2] = 1.0
    y = moe(drawn(B, S, D).abs(), POSITIONS, KEYS).flatten(0, 1)  # all choose expert 2, which has room for one
    assert y[0].any()
    assert not y[1:].any()


def test_the_gradient_of_an_auxiliary_loss_begins_with_its_scale() -> None:
    """A run with a loss scale has it in every gradient."""
    x, loss = torch.ones(3, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    add_auxiliary(x, loss, torch.tensor(8.0)).backward(torch.tensor([1.0, 2.0, 3.0]))
    assert (loss.grad, x.grad.tolist()) == (torch.tensor(8.0), [1.0, 2.0, 3.0])
