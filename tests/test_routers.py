"""Routers: which experts a token gets with which gates, auxiliary losses, and biases of the choice."""

import pytest
import torch
from random_values import drawn, filled
from routing import CHOICES, KEYS, POSITIONS, B, D, E, K, S
from torch import Tensor
from torch.nn import functional as F

from mplug_nn import Gating, Jitter, Router
from mplug_nn.router import Balance

# The router's choice.


def chosen_by_loops(scores: list[float], choice: Gating) -> list[int]:
    size = choice.num_experts // choice.num_groups
    groups = [scores[g * size : (g + 1) * size] for g in range(choice.num_groups)]
    worth = [sum(sorted(group)[-2:]) for group in groups]
    open_groups = sorted(range(choice.num_groups), key=lambda g: -worth[g])[: choice.top_groups]
    allowed = [e for e in range(choice.num_experts) if e // size in open_groups]
    return sorted(allowed, key=lambda e: -scores[e])[: choice.top_k]


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


def test_a_step_moves_the_bias_towards_experts_below_the_mean_load_and_keeps_the_load_unless_skipped() -> None:
    router = Router(D, Gating(4, 2), bias_rate=0.25, balance="global_batch", balance_coefficient=0.1)
    for load, skip in (([7.0, 3, 5, 5], 0.0), ([0.0] * 4, 1.0)):
        router.load.copy_(torch.tensor(load))
        router.step_ended(torch.tensor(skip))
        assert router.bias.tolist() == [-0.25, 0.25, 0, 0]
        assert router.last_load.tolist() == [7, 3, 5, 5]
