"""A student beside its teacher: losses and gradients beside plain torch, and the same under layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mplug import UsageError
from mplug.model.build import build_model
from mplug.training.assembly import Parts, build
from mplug_testing.harness import in_fp64, tiny_run
from mplug_testing.objectives import ObjectiveSuite
from mplug_testing.parity import require_parity

TEACHER = {
    "name": "llama",
    "vocab_size": 259,
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 2,
    "ffn_hidden_size": 40,
    "init_std": 0.2,
}
TAUGHT: dict[str, Any] = {
    "data.name": "mock",
    "data.documents": 3,
    "kernels.default": None,
    "trainer.seq_length": 24,
    "optimizer.lr": 0.02,
    "objectives.distill.teacher": TEACHER,
    "objectives.distill.chunk": 10,
    "objectives.distill.temperature": 1.5,
}


class TestDistill(ObjectiveSuite):
    """Two micro batches of packed documents, in chunks that do not divide the sequence."""

    plugin = "distill"
    settings = TAUGHT
    layouts = ("tp2", "cp2", "pp2 parallel.pp.schedule=zb-h1", "zero2 parallel.zero.stage=2", "fsdp2")
    examples = {"teacher": [{**TEACHER, "init_std": 0.1}]}
    beside = {"beta": {"objectives.distill.divergence": "jsd"}}


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) [N] of probabilities [N, V]."""
    return (p * (torch.log(p) - torch.log(q))).sum(dim=-1)


def jsd(p: Tensor, q: Tensor, beta: float) -> Tensor:
    mixed = beta * q + (1 - beta) * p
    return beta * kl(q, mixed) + (1 - beta) * kl(p, mixed)


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "forward": ({}, lambda p, q: kl(q, p)),
    "reverse": ({"divergence": "reverse"}, kl),
    "jsd": ({"divergence": "jsd", "beta": 0.3}, lambda p, q: jsd(p, q, 0.3)),
}


def logits_of(module: Any, head: Any, batch: dict[str, Tensor]) -> Tensor:
    """[B, S, V] of the units of one of the two models."""
    keys = torch.zeros(len(batch["tokens"]), dtype=torch.int64)
    x = module.embedding(batch["tokens"], batch["positions"], keys)
    for block in module.blocks.values():
        x = block(x, batch["positions"], keys, document_lengths=batch["document_lengths"])
    logits: Tensor = head.project(head.norm(x)[0])
    return logits


def expected_losses(parts: Parts, batch: dict[str, Tensor], name: str, share: float) -> Tensor:
    """The losses [N] of the targets."""
    module: Any = parts.model.module
    with torch.no_grad():
        taught = logits_of(module.teacher, module.head.loss.teacher.head, batch)
    logits, targets = logits_of(module, module.head, batch), batch["labels"] != -100
    own, other = (torch.softmax(one[targets] / 1.5, dim=-1) for one in (logits, taught))
    entropy = F.cross_entropy(logits[targets], batch["labels"][targets], reduction="none")
    return (1 - share) * FORMULAS[name][1](own, other) + share * entropy


@pytest.mark.wide("suites", quick=["jsd-0.25", "reverse-0.25"])
@pytest.mark.parametrize("share", [0.0, 0.25])
@pytest.mark.parametrize("name", FORMULAS)
def test_losses_and_gradients_are_those_of_the_formulas(name: str, share: float) -> None:
    fields = {**FORMULAS[name][0], "cross_entropy_weight": share}
    parts = build(tiny_run(in_fp64({**TAUGHT, **{f"objectives.distill.{key}": one for key, one in fields.items()}})))
    batches = [*parts.train_loader.loader.take(8)]
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 1)
    found = {piece.name: piece.gradient.clone() for piece in parts.pieces}
    assert not any("teacher" in piece for piece in found)
    losses = torch.cat([expected_losses(parts, batch, name, share) for batch in batches])
    parts.model.sinks.begin_step()
    losses.sum().backward()
    whole = torch.cat([piece.gradient.flatten() for piece in parts.pieces]).norm()
    for piece in parts.pieces:
        assert float((found[piece.name] - piece.gradient).norm()) <= 1e-11 * float(whole), piece.name
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 1)
    result = parts.stepper.update(0.0, 0.0)
    assert float(result.loss) == pytest.approx(float(losses.detach().mean()), rel=1e-12)
    diverging = torch.cat([expected_losses(parts, batch, name, 0.0) for batch in batches]).detach().mean()
    assert float(result.statistics["distill/divergence"]) == pytest.approx(float(diverging), rel=1e-12)


def test_the_teacher_stays_and_does_not_drop_anything() -> None:
    settings = {**TAUGHT, "objectives.distill.teacher": {**TEACHER, "name": "gpt", "dropout": 0.5}}
    parts = build(tiny_run(in_fp64(settings)))
    batches = [*parts.train_loader.loader.take(8)]
    before = {name: one.clone() for name, one in parts.model.frozen.items()}
    assert parts.num_frozen == sum(one.numel() for one in before.values()) > 0
    for step in (1, 2):
        parts.stepper.forward_backward(parts.train_loader.step_of(batches), step)
        parts.stepper.update(0.1, 0.1)
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 3)
    loss = float(parts.stepper.update(0.0, 0.0).loss)
    expected = torch.cat([expected_losses(parts, batch, "forward", 0.0) for batch in batches]).detach().mean()
    assert loss == pytest.approx(float(expected), rel=1e-12)
    assert all(torch.equal(one, before[name]) for name, one in parts.model.frozen.items())


def test_logits_of_both_models_exist_for_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from mplug_nn.head import Head

    parts, lengths = build(tiny_run(in_fp64({**TAUGHT, "objectives.distill.cross_entropy_weight": 0.5}))), list[int]()
    head: Head = parts.model.module.head  # type: ignore[assignment]
    product = head.project.forward

    def watched(x: Tensor) -> Tensor:
        lengths.append(x.shape[1])
        return product(x)

    monkeypatch.setattr(head.project, "forward", watched)
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    assert lengths
    assert max(lengths) == 10


REFUSED: dict[str, dict[str, Any]] = {
    r"the teacher has 300 tokens .* and the student 259": {"objectives.distill.teacher.vocab_size": 300},
    "predicts tokens further ahead; set num_mtp_layers=0 in its section": {
        "objectives.distill.teacher.num_mtp_layers": 1
    },
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_teach_is_refused_before_it_starts(sentence: str) -> None:
    settings = {name: value for name, value in TAUGHT.items() if name != "objectives.distill.teacher"}
    settings |= {f"objectives.distill.teacher.{name}": value for name, value in TEACHER.items()}
    with pytest.raises(UsageError, match=sentence):
        build_model(tiny_run({**settings, **REFUSED[sentence]}))


def test_beta_without_an_effect_is_refused() -> None:
    with pytest.raises(UsageError, match=r"beta has no effect: it is of the divergence jsd, not of 'reverse'"):
        tiny_run({**TAUGHT, "objectives.distill.divergence": "reverse", "objectives.distill.beta": 0.3})


SPARSE = {
    "model.name": "mixtral",
    "model.vocab_size": 259,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.num_layers": 1,
    "model.ffn_hidden_size": 48,
    "model.num_experts": 4,
    "model.num_experts_per_token": 2,
    "model.moe_ffn_hidden_size": 12,
}


@pytest.mark.parametrize("layout", ["ep2", "fsdp2", "pp2"])
@pytest.mark.wide("layouts", quick=[])
def test_a_layout_computes_what_one_process_does_with_experts(layout: str) -> None:
    """Both models have experts."""
    sparse = {name.removeprefix("model."): value for name, value in SPARSE.items()}  # with its name
    teacher = {**sparse, "num_layers": 2, "init_std": 0.2}
    require_parity({**TAUGHT, **SPARSE, "objectives.distill.teacher": teacher}, layout)
