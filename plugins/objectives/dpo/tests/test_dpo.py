"""Losses, gradients and figures of pairs, beside formulas of the papers in plain torch; and the same under layouts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mplug_dpo import DirectPreferences
from torch import Tensor

from mplug import UsageError
from mplug.training.assembly import Parts, build
from mplug_testing.harness import in_fp64, tiny_config, tiny_run
from mplug_testing.objectives import ObjectiveSuite

PAIRS: dict[str, Any] = {
    "data.name": "mock",
    "data.documents": 5,
    "data.pairs": True,
    "kernels.default": None,
    "trainer.seq_length": 24,
    "optimizer.lr": 0.02,
    "objectives.dpo.beta": 0.3,
}
LORA: dict[str, Any] = {"adapters.lora.rank": 3}
ROUTED: dict[str, Any] = {
    **PAIRS,
    "model.name": "mixtral",
    "model.vocab_size": 64,
    "model.hidden_size": 32,
    "model.num_layers": 1,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 48,
    "model.num_experts": 4,
    "model.num_experts_per_token": 2,
    "model.moe_ffn_hidden_size": 12,
    "model.expert_bias_rate": 0.5,
}


class TestDPO(ObjectiveSuite):
    """Two micro batches, packed pairs, and a live reference."""

    plugin = "dpo"
    settings = PAIRS
    layouts = ("cp2", "pp2 parallel.pp.schedule=zb-h1")
    examples = {"reference": ["data"]}  # refused with random tokens, of which no reference is known
    beside = {
        "label_smoothing": {"objectives.dpo.loss": "robust"},
        "gamma": {"objectives.dpo.loss": "simpo"},
    }


# The formulas, of sums and means over the tokens of answers: c chosen, r rejected, _0 under the reference.

Figures = dict[str, Tensor]
Formula = Callable[[Figures, float], Tensor]


def sigmoid_of(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def odds(mean: Tensor) -> Tensor:
    return torch.exp(mean) / (1 - torch.exp(mean))


def delta(f: Figures) -> Tensor:
    return (f["c"] - f["c_0"]) - (f["r"] - f["r_0"])


EPSILON, GAMMA = 0.2, 0.4
FORMULAS: dict[str, tuple[dict[str, Any], Formula]] = {
    "sigmoid": ({}, lambda f, b: -torch.log(sigmoid_of(b * delta(f)))),
    "conservative": (
        {"loss": "sigmoid", "label_smoothing": EPSILON},
        lambda f, b: (
            -(1 - EPSILON) * torch.log(sigmoid_of(b * delta(f))) - EPSILON * torch.log(sigmoid_of(-b * delta(f)))
        ),
    ),
    "robust": (
        {"loss": "robust", "label_smoothing": EPSILON},
        lambda f, b: (
            (-(1 - EPSILON) * torch.log(sigmoid_of(b * delta(f))) + EPSILON * torch.log(sigmoid_of(-b * delta(f))))
            / (1 - 2 * EPSILON)
        ),
    ),
    "hinge": ({"loss": "hinge"}, lambda f, b: torch.clamp(1 - b * delta(f), min=0)),
    "ipo": (
        {"loss": "ipo"},
        lambda f, b: ((f["c"] - f["c_0"]) / f["c_length"] - (f["r"] - f["r_0"]) / f["r_length"] - 1 / (2 * b)) ** 2,
    ),
    "simpo": (
        {"loss": "simpo", "gamma": GAMMA},
        lambda f, b: -torch.log(sigmoid_of(b * (f["c"] / f["c_length"] - f["r"] / f["r_length"]) - GAMMA)),
    ),
    "orpo": (
        {"loss": "orpo"},
        lambda f, b: (
            -f["c"] / f["c_length"]
            - b * torch.log(sigmoid_of(torch.log(odds(f["c"] / f["c_length"]) / odds(f["r"] / f["r_length"]))))
        ),
    ),
    "sigmoid with cross-entropy": (
        {"sft_weight": 0.7},
        lambda f, b: -torch.log(sigmoid_of(b * delta(f))) - 0.7 * f["c"] / f["c_length"],
    ),
}


def answers(parts: Parts, batch: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(log-probability, number of targets) of each document, each computed alone, in the order of the samples."""
    found = []
    for tokens, labels, lengths in zip(batch["tokens"], batch["labels"], batch["document_lengths"], strict=True):
        own = lengths.tolist()
        for inputs, targets in zip(tokens.split(own), labels.split(own), strict=True):
            positions = torch.arange(len(inputs))[None]
            alone = {"tokens": inputs[None], "positions": positions, "keys": torch.zeros(1, dtype=torch.int64)}
            logits = parts.model.logits(alone)[0]
            counts = targets != -100
            each = F.log_softmax(logits, dim=-1)[torch.arange(len(inputs)), targets.clamp(min=0)]
            found.append(((each * counts).sum(), counts.sum()))
    return found


def of_pairs(parts: Parts, batch: dict[str, Tensor], first: list[tuple[Tensor, Tensor]]) -> list[Figures]:
    """The figures of each pair whose answers have targets."""
    documents, pairs = batch["document_lengths"].shape[1], []
    own = answers(parts, batch)
    for start in range(0, len(own), documents):
        for at in range(start, start + documents // 2 * 2, 2):
            (c, c_length), (r, r_length), (c_0, _), (r_0, _) = own[at], own[at + 1], first[at], first[at + 1]
            if c_length and r_length:
                pairs.append({"c": c, "r": r, "c_0": c_0, "r_0": r_0, "c_length": c_length, "r_length": r_length})
    return pairs


@pytest.mark.wide("suites", quick=["sigmoid", "orpo"])
@pytest.mark.parametrize("name", FORMULAS)
def test_losses_gradients_and_figures_are_those_of_the_formulas(name: str) -> None:
    """In the second step, whose reference are the weights before the first one; each answer is computed alone."""
    fields, formula = FORMULAS[name]
    settings = {**PAIRS, **{f"objectives.dpo.{field}": value for field, value in fields.items()}}
    parts = build(tiny_run(in_fp64(settings)))
    batches = [[*parts.train_loader.loader.take(8)] for _ in range(2)]
    with torch.no_grad():
        first = [answers(parts, batch) for batch in batches[1]]
    parts.stepper.forward_backward(parts.train_loader.step_of(batches[0]), 1)
    parts.stepper.update(0.02, 0.0)
    parts.stepper.forward_backward(parts.train_loader.step_of(batches[1]), 2)
    found = {piece.name: piece.gradient.clone() for piece in parts.pieces}

    pairs = [one for batch, before in zip(batches[1], first, strict=True) for one in of_pairs(parts, batch, before)]
    losses = torch.stack([formula(one, 0.3) for one in pairs])
    parts.model.sinks.begin_step()
    losses.sum().backward()
    losses, pairs = losses.detach(), [{figure: value.detach() for figure, value in one.items()} for one in pairs]
    expected = {piece.name: piece.gradient.clone() for piece in parts.pieces}
    whole = torch.cat([one.flatten() for one in expected.values()]).norm()
    for parameter, gradient in expected.items():
        assert float((found[parameter] - gradient).norm()) <= 1e-11 * float(whole), parameter

    parts.stepper.forward_backward(parts.train_loader.step_of(batches[1]), 2)
    result = parts.stepper.update(0.0, 0.0)
    assert (float(result.loss), int(result.tokens)) == (pytest.approx(float(losses.mean()), rel=1e-12), len(pairs))
    by_length = name in ("simpo", "orpo")
    means = [[one[side] / (one[f"{side}_length"] if by_length else 1) for one in pairs] for side in "cr"]
    first_of = [[0 * one["c"] if by_length else one[f"{side}_0"] for one in pairs] for side in "cr"]
    logps = [torch.stack(values).mean() for values in means]
    both = zip(means, first_of, strict=True)
    chosen, rejected = (0.3 * (torch.stack(values) - torch.stack(first)) for values, first in both)
    figures = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/accuracies": (chosen > rejected).double().mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "logps/chosen": logps[0],
        "logps/rejected": logps[1],
    }
    for figure, value in figures.items():
        assert float(result.statistics[figure]) == pytest.approx(float(value), rel=1e-11), figure


def test_a_new_run_begins_at_the_reference() -> None:
    """Every pair then has the loss log 2, and so has an evaluation."""
    parts = build(tiny_run(in_fp64(PAIRS)))
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    assert float(parts.stepper.update(0.0, 0.0).loss) == pytest.approx(0.6931471805599453, rel=1e-15)
    assert parts.validation_loader is not None
    assert float(parts.stepper.evaluate(parts.validation_loader.take_evenly(6))) == pytest.approx(0.6931471805599453)


def test_with_adapters_the_reference_is_the_model_without_them() -> None:
    """Only the adapters have first weights, which change nothing."""
    from mplug_updates.first_weights import FIRST

    parts = build(tiny_run(in_fp64({**PAIRS, **LORA})))
    batch = next(iter(parts.train_loader.loader.take(8)))
    with torch.no_grad():
        plain = answers(parts, batch)
    for step in (1, 2):
        parts.stepper.forward_backward(parts.train_loader.take(8), step)
        result = parts.stepper.update(0.1, 0.0)
    assert float(result.loss) < 0.69
    states = [parts.optimizer.state(piece) for piece in parts.pieces]
    kept = sum(state[FIRST].numel() for state in states)  # type: ignore[union-attr]
    assert kept < parts.num_frozen / 2
    for piece, state in zip(parts.pieces, states, strict=True):
        piece.master.copy_(state[FIRST])  # type: ignore[arg-type]
    with torch.no_grad():
        restored = answers(parts, batch)
    torch.testing.assert_close(restored, plain, rtol=1e-13, atol=1e-13)


def test_the_bias_of_routers_is_a_part_of_the_reference() -> None:
    """No gradient changes it. With weights that stay, the reference still is the model before the first step."""
    parts = build(tiny_run(in_fp64(ROUTED)))
    batches = [*parts.train_loader.loader.take(8)]
    with torch.no_grad():
        parts.model.module.eval()
        first = [answers(parts, batch) for batch in batches]
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 1)
    parts.stepper.update(0.0, 0.0)
    with torch.no_grad():
        parts.model.module.eval()
        now = [of_pairs(parts, *pair) for pair in zip(batches, first, strict=True)]
    assert any(module.bias.abs().max() > 0 for module in parts.model.module.modules() if hasattr(module, "bias_rate"))
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 2)
    result = parts.stepper.update(0.0, 0.0)
    losses = torch.stack([FORMULAS["sigmoid"][1](one, 0.3) for pairs in now for one in pairs])
    assert float(result.loss) == pytest.approx(float(losses.mean()), rel=1e-12)
    assert abs(float(result.loss) - 0.6931471805599453) > 1e-6


def test_sums_that_the_data_know_are_a_reference(tmp_path: Path) -> None:
    """The loss of a live reference, from log-probabilities of whole answers in the lines of a file."""
    path = tmp_path / "pairs.jsonl"
    lines = [{"prompt": "ab", "chosen": "cde" * n, "rejected": "fg" * n} for n in range(1, 5)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    of_file = {**PAIRS, "data.name": "preferences", "data.path": str(path), "trainer.eval_every": 0}
    of_file = {name: value for name, value in of_file.items() if name not in ("data.documents", "data.pairs")}
    of_file |= {"data.validation_path": str(path), "trainer.global_batch_size": 4, "data.max_pairs": 1}
    live = build(tiny_run(in_fp64(of_file)))
    for batch in live.train_loader.loader.take(4):
        with torch.no_grad():
            sums = [float(value) for value, _ in answers(live, batch)]
        for row, tokens in enumerate(batch["tokens"].tolist()):
            text = bytes(token for token in tokens if token < 256).decode()
            (line,) = (one for one in lines if text.startswith(f"{one['prompt']}{one['chosen']}ab"))
            line |= {"ref_chosen_logps": sums[3 * row], "ref_rejected_logps": sums[3 * row + 1]}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    known = build(tiny_run(in_fp64({**of_file, "data.reference": True, "objectives.dpo.reference": "data"})))
    losses = []
    for parts in (live, known):
        for step in (1, 2):
            parts.stepper.forward_backward(parts.train_loader.take(4), step)
            losses.append(float(parts.stepper.update(0.05, 0.0).loss))
    assert losses[:2] == pytest.approx(losses[2:], rel=2e-5)
    assert losses[1] < losses[0]


WRONG = {
    "label_smoothing is of the losses": {"loss": "ipo", "label_smoothing": 0.1},
    "exo_pair needs label_smoothing above 0": {"loss": "exo_pair"},
    "gamma has no effect": {"loss": "sigmoid", "gamma": 1.0},
    "reference=data has no effect": {"loss": "simpo", "reference": "data"},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_fields_that_have_no_effect_are_refused(sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DirectPreferences.Config(**WRONG[sentence])


REFUSED: dict[str, dict[str, Any]] = {
    "needs micro batches with 'sequences', which data/mock does not supply": {"data.pairs": False},
    "has no loss for tokens further ahead; set model.num_mtp_layers=0": {
        "model.name": "llama",
        "model.ffn_hidden_size": 40,
        "model.num_mtp_layers": 1,
    },
    "has weights of the losses of targets": {"data.loss_weights": True},
    "needs micro batches with 'reference_log_probabilities'": {"objectives.dpo.reference": "data"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_computed_is_refused_before_it_starts(sentence: str) -> None:
    from mplug.model.build import build_model

    with pytest.raises(UsageError, match=sentence):
        build_model(tiny_run({**PAIRS, **REFUSED[sentence]}))


def test_a_run_has_one_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="a run has one loss, and dpo and other each compute one"):
        tiny_config({**PAIRS, "objectives.other.x": 1})


def test_pairs_without_an_objective_are_refused_with_the_option_that_names_one() -> None:
    from mplug.model.build import build_model

    alone = {field: value for field, value in PAIRS.items() if not field.startswith("objectives")}
    with pytest.raises(UsageError, match=r"data/mock numbers the sequences of a sample for an objective.*--objective"):
        build_model(tiny_run(alone))
