"""Weights of losses: they multiply the loss of each target, and the sum is divided by the number of targets.

The layouts compute what one process does, with packed samples too.
"""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import DECODER
from torch import Tensor

from mplug.training.assembly import build
from mplug_faults import malformed
from mplug_nn import Linear, Loss
from mplug_nn.loss import IGNORED
from mplug_testing.harness import in_fp64, tiny_run
from mplug_testing.parity import require_parity

B, S, D, V = 2, 8, 6, 11
WEIGHTED: dict[str, Any] = {"data.name": "mock", "data.loss_weights": True}
PACKED = {**WEIGHTED, "data.documents": 3}
AHEAD = {**DECODER, "model.name": "llama", "model.num_mtp_layers": 2, "model.mtp_loss_coefficient": 0.5}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def test_the_loss_and_its_gradients_are_those_of_weighted_losses_of_tokens() -> None:
    labels = torch.arange(B * S).view(B, S) % V
    labels[0, :3], weights = IGNORED, drawn(B, S).abs()
    weights[1, 2] = 0
    found = []
    for is_ours in (True, False):
        hidden, project = drawn(B, S, D).requires_grad_(), Linear(D, V, bias=False).double()
        with torch.no_grad():
            project.weight.copy_(drawn(V, D))
        if is_ours:
            loss, count = Loss()(hidden, project, labels, weights)
            assert int(count) == B * S - 3
        else:
            logits = project(hidden).flatten(0, 1)
            each = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
            loss = (each * weights.flatten()).sum()
        loss.backward()
        found.append((loss.detach(), hidden.grad, project.weight.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


def test_weights_of_one_are_no_weights() -> None:
    labels, hidden, project = torch.arange(B * S).view(B, S) % V, drawn(B, S, D), Linear(D, V, bias=False).double()
    project.weight.data = drawn(V, D)
    plain, weighted = (Loss()(hidden, project, labels, weights)[0] for weights in (None, torch.ones(B, S)))
    assert torch.equal(plain, weighted)


def test_a_run_sums_weighted_losses_of_samples_and_divides_by_the_number_of_targets() -> None:
    run = tiny_run(in_fp64({**WEIGHTED, "trainer.micro_batch_size": 2, "trainer.global_batch_size": 2}))
    parts = build(run)
    (batch,) = parts.train_loader.take(2)
    batch = {name: x for name, x in batch.items() if name != "keys"}
    weights, expected = batch["loss_weights"][:, 0].tolist(), 0.0
    assert weights[0] != weights[1]

    def loss(own: dict[str, Tensor]) -> float:
        (one,) = parts.train_loader.step_of([own])
        return parts.model.loss(parts.stepper.entries(one, 1))[0].item()  # type: ignore[attr-defined]

    for row, weight in enumerate(weights):
        own = {name: x[row : row + 1] if len(x) == 2 else x for name, x in batch.items() if name != "loss_weights"}
        expected += weight * loss(own)
    assert loss(batch) == pytest.approx(expected, rel=1e-13)
    parts.stepper.forward_backward(parts.train_loader.step_of([batch]), 1)
    assert float(parts.stepper.update(0.0, 0.0).loss) == pytest.approx(expected / batch["labels"].numel(), rel=1e-13)


@pytest.mark.parametrize("model", [{}, AHEAD], ids=["gpt", "tokens ahead"])
def test_targets_of_weight_zero_have_no_gradient(model: dict[str, Any]) -> None:
    parts = build(tiny_run(in_fp64({**PACKED, **model})))
    batches = [{**batch, "loss_weights": torch.zeros(batch["labels"].shape)} for batch in parts.train_loader.take(4)]
    parts.stepper.forward_backward(parts.train_loader.step_of([{**one} for one in batches]), 1)
    assert not any(piece.gradient.any() for piece in parts.pieces)


WRONG = {
    "the wrong shape": (torch.ones(B, S - 1), r"'loss_weights' \(2, 7\) of torch.float32 must be \[B, S\]"),
    "integers": (torch.ones(B, S, dtype=torch.int64), "must be .* of floating-point numbers"),
    "a negative weight": (torch.full((B, S), -0.5), "holds -0.5; a weight is at least 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_weights_that_break_the_contract_are_refused(what: str) -> None:
    row = torch.arange(S).expand(B, S).contiguous()
    batch = {"tokens": row, "labels": row, "positions": row, "sample_ids": torch.arange(B)}
    assert malformed({**batch, "loss_weights": torch.ones(B, S)}, S) == ""
    weights, sentence = WRONG[what]
    assert re.search(sentence, malformed({**batch, "loss_weights": weights}, S))


WIDE = pytest.mark.wide("layouts")


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param("tp2pp2", PACKED, id="tp2pp2 packed"),
        pytest.param("cp2", PACKED, id="cp2 packed"),
        pytest.param("dp2", WEIGHTED, id="dp2", marks=WIDE),
        pytest.param("cp2", WEIGHTED, id="cp2", marks=WIDE),
        pytest.param("tp2 parallel.tp.sequence_parallel=false", WEIGHTED, id="tp2 whole sequences", marks=WIDE),
        pytest.param("tp2pp2", {**PACKED, **AHEAD}, id="tp2pp2 tokens ahead", marks=WIDE),
    ],
)
@pytest.mark.wide("layouts", quick=["cp2 packed"])
def test_a_layout_computes_what_one_process_does(layout: str, settings: dict[str, Any]) -> None:
    """Other layouts of packed samples with weights are cases of the set `pairs`."""
    require_parity(settings, layout)
