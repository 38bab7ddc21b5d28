"""Losses, gradients and figures of completions, beside formulas of the papers in plain torch; and under layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mplug_grpo import PolicyOptimization
from torch import Tensor

from mplug import UsageError
from mplug.training.assembly import Parts, build
from mplug_testing.harness import in_fp64, tiny_run
from mplug_testing.objectives import ObjectiveSuite
from mplug_testing.parity import require_parity

ROLLOUTS: dict[str, Any] = {
    "data.name": "mock",
    "data.documents": 5,
    "data.rollouts": True,
    "kernels.default": None,
    "trainer.seq_length": 24,
    "optimizer.lr": 0.02,
    "objectives.grpo.beta": 0.2,
}


class TestGRPO(ObjectiveSuite):
    """Two micro batches, several completions in a sample, and a live reference."""

    plugin = "grpo"
    settings = ROLLOUTS
    layouts = ("cp2", "pp2 parallel.pp.schedule=zb-h1")
    beside = {
        "epsilon_high": {"objectives.grpo.loss": "cispo"},
        "length": {"objectives.grpo.loss": "dr_grpo"},
        "correction": {"objectives.grpo.old": "current"},
        "correction_max": {"objectives.grpo.old": "current", "objectives.grpo.correction": "token_truncate"},
    }


# The formulas of a completion: x are the log-probabilities of its tokens, o those of the sampler, f under the
# reference; a is its advantage.

Values = dict[str, Tensor]
LOW, HIGH, BETA, LENGTH = 0.1, 0.15, 0.2, 24


def k3(v: Values) -> Tensor:
    return torch.exp(v["f"] - v["x"]) - (v["f"] - v["x"]) - 1


def clipped(ratio: Tensor, a: Tensor, low: float = 1 - LOW, high: float = 1 + HIGH) -> Tensor:
    return -torch.min(ratio * a, torch.clamp(ratio, low, high) * a)


def by_token(v: Values) -> Tensor:
    return clipped(torch.exp(v["x"] - v["o"]), v["a"]) + BETA * k3(v)


def by_sequence(v: Values) -> Tensor:
    """GSPO, equation 7: one ratio, the geometric mean of those of the tokens."""
    ratio = torch.exp((v["x"] - v["o"]).sum() / len(v["x"]))
    return clipped(ratio, v["a"]) + BETA * k3(v)


def by_weight(v: Values) -> Tensor:
    ratio = torch.exp(v["x"] - v["o"]).detach().clamp(max=1.1)
    return -ratio * v["a"] * v["x"] + BETA * k3(v)


def by_itself(v: Values) -> Tensor:
    """On-policy, corrected by the whole sequence, whose ratio is bounded."""
    ratio = torch.exp(v["x"] - v["x"].detach())
    weight = torch.exp((v["x"].detach() - v["o"]).sum())
    return clipped(ratio, v["a"]) * torch.clamp(weight, max=1.05) + BETA * k3(v)


def dual(v: Values) -> Tensor:
    ratio = torch.exp(v["x"] - v["o"])
    plain = torch.min(ratio * v["a"], torch.clamp(ratio, 1 - LOW, 1 + HIGH) * v["a"])
    return -torch.where(v["a"] < 0, torch.max(plain, 1.2 * v["a"]), plain) + BETA * v["d"] ** 2 / 2


CLIP = {"epsilon": LOW, "epsilon_high": HIGH}
FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Values], Tensor]]] = {
    "grpo": ({"loss": "grpo", **CLIP}, by_token),
    "dr_grpo": ({"loss": "dr_grpo", **CLIP}, by_token),
    "dapo": ({"loss": "dapo", **CLIP}, by_token),
    "gspo": ({"loss": "gspo", **CLIP}, by_sequence),
    "cispo": ({"loss": "cispo", "epsilon_high": 1.1}, by_weight),
    "dual clip, k2": ({"loss": "dapo", **CLIP, "delta": 1.2, "kl": "k2"}, dual),
    "corrected": (
        {"loss": "grpo", **CLIP, "old": "current", "correction": "sequence_truncate", "correction_max": 1.05},
        by_itself,
    ),
}


def completions(parts: Parts, batches: list[Any]) -> list[Values]:
    """The values of each completion, computed alone from the model's logits."""
    found = []
    for batch in batches:
        for row, lengths in enumerate(batch["document_lengths"].tolist()):
            begin = 0
            for length in lengths:
                own = slice(begin, begin + length)
                begin += length
                if length < 2:  # a single token of the sample's data has no target
                    continue
                tokens, labels = batch["tokens"][row, own], batch["labels"][row, own]
                keys = torch.zeros(1, dtype=torch.int64)
                alone = {"tokens": tokens[None], "positions": torch.arange(length)[None], "keys": keys}
                each = F.log_softmax(parts.model.logits(alone)[0], dim=-1)
                x = each[torch.arange(length - 1), labels[:-1]]
                sampled, advantage = (
                    batch["sampled_log_probabilities"][row, own][:-1],
                    batch["advantages"][row, begin - 1],
                )
                found.append({"x": x, "o": sampled.double(), "a": advantage.double()})
    return found


@pytest.mark.wide("suites", quick=["gspo", "dual clip, k2"])
@pytest.mark.parametrize("name", FORMULAS)
def test_losses_gradients_and_figures_are_those_of_the_formulas(name: str) -> None:
    """In the second step, whose reference are the weights before the first one; each completion is computed alone."""
    fields, formula = FORMULAS[name]
    parts = build(tiny_run(in_fp64({**ROLLOUTS, **{f"objectives.grpo.{field}": one for field, one in fields.items()}})))
    batches = [[*parts.train_loader.loader.take(8)] for _ in range(2)]
    with torch.no_grad():
        first = completions(parts, batches[1])
    parts.stepper.forward_backward(parts.train_loader.step_of(batches[0]), 1)
    parts.stepper.update(0.05, 0.0)
    parts.stepper.forward_backward(parts.train_loader.step_of(batches[1]), 2)
    found = {piece.name: piece.gradient.clone() for piece in parts.pieces}

    values = completions(parts, batches[1])
    for one, before in zip(values, first, strict=True):
        one["f"], one["d"] = before["x"], before["x"] - one["x"]
    losses = [formula(one) for one in values]
    if fields["loss"] in ("dapo", "cispo"):
        total, number = torch.cat(losses).sum(), sum(len(one) for one in losses)
    else:
        each = [one.sum() / LENGTH if fields["loss"] == "dr_grpo" else one.mean() for one in losses]
        total, number = torch.stack(each).sum(), len(losses)
    parts.model.sinks.begin_step()
    total.backward()
    total, values = total.detach(), [{name: one.detach() for name, one in own.items()} for own in values]
    expected = {piece.name: piece.gradient.clone() for piece in parts.pieces}
    whole = torch.cat([one.flatten() for one in expected.values()]).norm()
    for parameter, gradient in expected.items():
        assert float((found[parameter] - gradient).norm()) <= 1e-11 * float(whole), parameter

    parts.stepper.forward_backward(parts.train_loader.step_of(batches[1]), 2)
    result = parts.stepper.update(0.0, 0.0)
    assert (float(result.loss), int(result.tokens)) == (pytest.approx(float(total) / number, rel=1e-11), number)
    kl = [one["d"] ** 2 / 2 if fields.get("kl") == "k2" else k3(one) for one in values]
    by_tokens = fields["loss"] in ("dapo", "cispo")
    mean = torch.cat(kl).mean() if by_tokens else torch.stack([one.mean() for one in kl]).mean()
    assert float(result.statistics["kl"]) == pytest.approx(float(mean), rel=1e-11)
    gap = [(one["x"] - one["o"]).abs() for one in values]
    mean = torch.cat(gap).mean() if by_tokens else torch.stack([one.mean() for one in gap]).mean()
    assert float(result.statistics["sampling/logp_difference"]) == pytest.approx(float(mean), rel=1e-11)
    if name in ("grpo", "dr_grpo"):
        ratios = [torch.exp(one["x"] - one["o"]) for one in values]
        high = [((r > 1 + HIGH) & (one["a"] > 0)).double().mean() for r, one in zip(ratios, values, strict=True)]
        low = [((r < 1 - LOW) & (one["a"] < 0)).double().mean() for r, one in zip(ratios, values, strict=True)]
        shares = {"high": torch.stack(high).mean(), "low": torch.stack(low).mean()}
        assert all(0 < float(one) < 1 for one in shares.values())
        for side, share in shares.items():
            assert float(result.statistics[f"clip_ratio/{side}_mean"]) == pytest.approx(float(share), rel=1e-11)


LAYOUTS = ["tp2", "pp2", "cp2", "zero2", "fsdp2"]


@pytest.mark.wide("layouts")
@pytest.mark.parametrize(("layout", "loss"), [(one, loss) for one in LAYOUTS for loss in ("gspo", "dapo")])
def test_a_layout_computes_what_one_process_does(layout: str, loss: str) -> None:
    corrected = {"old": "current", "correction": "sequence_mask", "correction_max": 1.05} if loss == "gspo" else {}
    fields = {"objectives.grpo.loss": loss, **{f"objectives.grpo.{name}": one for name, one in corrected.items()}}
    require_parity({**ROLLOUTS, **fields, "adapters.lora.rank": 3}, layout)


WRONG = {
    "cispo truncates ratios at epsilon_high": {"loss": "cispo"},
    "delta has no effect": {"loss": "cispo", "epsilon_high": 5.0, "delta": 2.0},
    "length has no effect": {"loss": "grpo", "length": 5},
    "correction=token_mask has no effect with old=sampled": {"correction": "token_mask"},
    "gspo has one ratio": {"loss": "gspo", "old": "current", "correction": "token_mask"},
    "correction_max has no effect": {"correction_max": 2.0},
    "kl has no effect with beta=0": {"kl": "k2"},
    "epsilon has no effect": {"loss": "cispo", "epsilon_high": 5.0, "epsilon": 0.1},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_fields_that_have_no_effect_are_refused(sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PolicyOptimization.Config(**WRONG[sentence])


def test_data_without_advantages_are_refused_before_a_run_starts() -> None:
    from mplug.model.build import build_model

    settings = {**ROLLOUTS, "data.rollouts": False, "data.pairs": True}
    with pytest.raises(UsageError, match="objectives/grpo needs micro batches with 'advantages'"):
        build_model(tiny_run(settings))
