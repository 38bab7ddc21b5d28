"""Models beside a narrower base model: maximal update parametrization (`model.mup_base`).

The set `pairs` compares further layouts and optimizers with one process.
"""

import json
from typing import Any

import pytest
import scripts
import tiny_models
import torch
from click.testing import CliRunner
from mplug_explain.command import command as explain
from torch import Tensor

from mplug import UsageError, Widths
from mplug.model.build import build_model
from mplug.training.assembly import Parts, build
from mplug_testing.harness import EXACT, tiny_run

WIDER: dict[str, Any] = {"model.hidden_size": 64, "model.mup_base": {"hidden_size": 16}}
"""The tiny run, four times as wide as its base model: heads of 16 beside heads of 4."""
FP64: dict[str, Any] = {"trainer.precision": "fp64", "trainer.max_grad_norm": 0.0}
MUON = {"optimizer.name": "muon", "optimizer.scale": "unit_rms_norm"}
EXPERTS: dict[str, Any] = {**tiny_models.EXPERTS, "model.hidden_size": 64, "model.mup_base": {"hidden_size": 16}}


def trained(settings: dict[str, Any], steps: int = 1, lr: float = 0.01, decay: float = 0.0) -> Parts:
    parts = build(tiny_run(settings))
    for step in range(1, steps + 1):
        parts.stepper.forward_backward(parts.train_loader.take(8), step)
        parts.stepper.update(lr, decay)
    return parts


def masters(parts: Parts) -> dict[str, Tensor]:
    return {piece.name: piece.master.clone() for piece in parts.pieces}


# What the plan says.


def test_the_plan_has_the_widths_and_initial_values_of_each_parameter() -> None:
    """Table 8 of arXiv 2203.03466, by hand: four times the inputs halve the standard deviation."""
    model = build_model(tiny_run({**WIDER, "model.bias": True}))
    found = {name: placement.parameter for name, placement in model.placements.items()}
    widths = {
        "embedding.token.weight": Widths(4, 1),
        "blocks.0.norm1.weight": Widths(4, 1),
        "blocks.0.attn.q_norm": Widths(4, 1),
        "blocks.0.attn.qkv.weight": Widths(4, 4),
        "blocks.0.attn.qkv.bias": Widths(4, 1),
        "blocks.0.attn.out.weight": Widths(4, 4),
        "blocks.3.mlp.down.weight": Widths(4, 4),
        "head.project.weight": Widths(4, 1),
    }
    assert {name: found[name].widths for name in widths} == widths
    stds = [found[name].init.std for name in ("embedding.token.weight", "blocks.0.attn.qkv.weight")]
    assert stds == pytest.approx([0.06, 0.03])
    assert found["blocks.0.attn.out.weight"].init.std == pytest.approx(0.03 / 8**0.5)
    assert model.module.get_submodule("blocks.0.attn").spec.scale == pytest.approx(4**0.5 / 16)
    assert model.module.get_submodule("head").scale == pytest.approx(1 / 4)


def test_a_router_is_an_output_and_biases_of_experts_are_vectors() -> None:
    model = build_model(tiny_run({**EXPERTS, "model.mup_base": {"hidden_size": 16, "moe_ffn_hidden_size": 8}}))
    router = model.placements["blocks.1.moe.router.weight"].parameter
    assert router.widths == Widths(1, 4)
    assert router.init.std == pytest.approx(0.06 / 4)  # logits of the base model's size, of 4 times as many inputs
    down = {name: one.parameter for name, one in model.placements.items() if name.endswith("experts.down")}
    assert {one.widths for one in down.values()} == {Widths(4, 3)}


def test_the_base_model_itself_trains_as_without_the_field() -> None:
    same, plain = (masters(trained(one, 2)) for one in ({"model.mup_base": {"hidden_size": 32}}, {}))
    assert all(torch.equal(one, plain[name]) for name, one in same.items())


# What optimizers do.


@pytest.mark.parametrize(
    ("optimizer", "hidden", "tables"),
    [("adamw", 0.25, 1.0), ("lion", 0.25, 1.0), ("adafactor", 0.25, 1.0), ("sgd", 1.0, 4.0), ("schedulefree", 0.25, 1)],
)
@pytest.mark.wide("layouts", quick=["adamw-0.25-1.0", "sgd-1.0-4.0"])
def test_a_first_update_has_the_rate_of_its_width(optimizer: str, hidden: float, tables: float) -> None:
    """The updates of the whole model at each rate, from the same weights and gradients."""
    name = {**FP64, **WIDER, "optimizer.name": optimizer}
    more = {"optimizer.weight_decay": 0.0} if optimizer == "sgd" else {}
    found = masters(trained({**name, **more}))

    def without_widths(lr: float) -> dict[str, Tensor]:
        parts = build(tiny_run({**name, **more}))
        plain = build(tiny_run({**FP64, "model.hidden_size": 64, "optimizer.name": optimizer, **more}))
        for theirs, ours in zip(plain.pieces, parts.pieces, strict=True):
            theirs.master.copy_(ours.master)
        plain.model.module.get_submodule("head").scale = parts.model.module.get_submodule("head").scale
        for number in plain.model.module.get_submodule("blocks")._modules:
            one, other = (x.model.module.get_submodule(f"blocks.{number}.attn") for x in (plain, parts))
            one.scale = other.scale
        plain.stepper.forward_backward(plain.train_loader.take(8), 1)
        plain.stepper.update(lr, 0.0)
        return masters(plain)

    for factor in (hidden, tables):
        expected = without_widths(0.01 * factor)
        for key in found:
            is_hidden = key.startswith("blocks") and found[key].ndim == 2
            if (is_hidden and factor == hidden) or (not is_hidden and factor == tables):
                torch.testing.assert_close(found[key], expected[key], rtol=EXACT, atol=EXACT, msg=key)


def test_the_decay_of_an_update_is_that_of_the_base_model() -> None:
    """Rate times decay: 0.01 x 0.5 of every matrix, whatever its width."""
    with_decay, without = (masters(trained({**FP64, **WIDER}, decay=decay)) for decay in (0.5, 0.0))
    before = masters(build(tiny_run({**FP64, **WIDER})))
    for name in ("embedding.token.weight", "blocks.0.mlp.up.weight", "head.project.weight"):
        decayed = without[name] - with_decay[name]
        torch.testing.assert_close(decayed, 0.01 * 0.5 * before[name], rtol=1e-6, atol=1e-12)


def test_muon_keeps_the_rate_of_hidden_matrices() -> None:
    parts = build(tiny_run({**WIDER, **MUON}))
    before = masters(parts)
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    parts.stepper.update(0.01, 0.0)
    change = masters(parts)["blocks.0.mlp.down.weight"] - before["blocks.0.mlp.down.weight"]
    values = torch.linalg.svdvals(change.double()) / (0.01 * (64 / 256) ** 0.5)  # lr sqrt(outputs / inputs)
    assert float(values[-2]) > 0.6  # the norm behind it has no gradient along one direction
    assert float(values.max()) < 1.3


# The claim of the method.


def change_of_logits(width: int, settings: dict[str, Any], steps: int = 5) -> float:
    """The root mean square of what a few updates change in the logits of a batch."""
    run = tiny_run({"model.hidden_size": width, "model.num_layers": 2, "model.qk_norm": False, **settings})
    parts = build(run)
    tokens = torch.randint(0, 259, (4, 16), generator=torch.Generator().manual_seed(1))
    positions, keys = torch.arange(16)[None], torch.zeros(4, dtype=torch.int64)

    @torch.no_grad()
    def logits() -> Tensor:
        module = parts.model.module
        x = module.get_submodule("embedding")(tokens, positions, keys)
        for block in module.get_submodule("blocks").children():
            x = block(x, positions, keys)
        found: Tensor = module.get_submodule("head").logits(x)
        return found

    before = logits()
    for step in range(1, steps + 1):
        parts.stepper.forward_backward(parts.train_loader.take(8), step)
        parts.stepper.update(0.01, 0.0)
    return float((logits() - before).square().mean().sqrt())


@pytest.mark.wide("layouts")
def test_the_change_of_logits_grows_with_the_width_only_without_a_base_model() -> None:
    """The coordinate check of arXiv 2203.03466, appendix D.1, at the widths 32 and 512."""
    narrow = change_of_logits(32, {})
    usual = change_of_logits(512, {"model.init_std": 0.06 / 4})
    mup = change_of_logits(512, {"model.mup_base": {"hidden_size": 32}})
    assert usual > 2.5 * narrow
    assert mup < 1.5 * narrow


# Refusals and reports.


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"optimizer.name": "soap"}, "optimizers/soap does not state how its learning rate depends on widths"),
        ({"optimizer.name": "muon"}, "scale=match_rms_adamw of optimizers/muon does not transfer"),
        ({"optimizer.name": "adafactor", "optimizer.scale_parameter": True}, "scale_parameter multiplies rates"),
        ({"optimizer.groups": [{"match": "head", "optimizer": {"name": "soap"}}]}, "optimizers/soap does not state"),
        ({"model.mup_base": {"hidden_size": 16, "vocab_size": 100}}, "vocabulary is no width"),
        ({"model.mup_base": {"hidden_size": 16, "num_layers": 2}}, "2 blocks beside 4"),
        (
            {"model.mup_base": {"hidden_sise": 16}},
            "hidden_sise: the model has no such field; did you mean 'hidden_size'",
        ),
        ({"model.mup_base": {"hidden_size": 18}}, "does not divide hidden_size=18"),
    ],
    ids=str,
)
def test_what_does_not_transfer_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        build_model(tiny_run({**WIDER, **settings}))


def test_explain_shows_the_rates_of_widths() -> None:
    words = ["--model", "gpt", "--preset", "nano", "--set", "model.mup_base.hidden_size=32"]
    result = CliRunner().invoke(explain, words)
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if "attn.qkv.weight" in line and "heads" in line]
    assert line.rstrip().endswith("by width: lr x 0.25, decay x 4")


def test_the_recorded_best_rates_transfer_only_with_a_base_model() -> None:
    """What benchmarks/transfer.py has measured, as docs/widths.md says."""
    script = scripts.script("benchmarks/transfer.py")
    runs = json.loads(script.OUT.read_text())["runs"]

    def best(kind: str, width: int) -> int:
        losses: dict[int, float] = script.mean_losses(runs, kind, width)
        return min(losses, key=losses.__getitem__)

    assert all(abs(best("mup", width) - best("mup", 128)) <= 1 for width in (256, 512))
    assert best("standard", 512) <= best("standard", 128) - 2
