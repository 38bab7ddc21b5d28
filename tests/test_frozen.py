"""Frozen parameters: they have values, placements and checkpoints as all others, and nothing that training needs.

`pytest --wide pairs` combines them with other features, `--wide precision` runs in bf16 and fp16.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from mplug_explain.command import command as explain
from mplug_gpt import GPT
from pydantic import Field
from tiny_runs import position_of
from torch import Tensor

from mplug import UsageError
from mplug.config.defaults import default_settings
from mplug.model.build import build_model
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.training.assembly import Parts, build
from mplug_estimates import measure_bytes
from mplug_pretrained.weights import load_weights
from mplug_saving.folder import newest, read_manifest
from mplug_saving.position import Position
from mplug_testing import run_workers
from mplug_testing.harness import (
    EXACT,
    difference,
    rounding_bound,
    tiny_config,
    tiny_run,
)
from mplug_testing.harness import logical as logical_of
from mplug_testing.parity import trained_once
from mplug_validation import evaluate

FIRST: dict[str, Any] = {"model.frozen": ["embedding", "blocks.0"]}
ALL_BUT_LAST: dict[str, Any] = {"model.frozen": ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]}
ONLY_EMBEDDING: dict[str, Any] = {"model.frozen": ["blocks", "head"]}
EXPERTS: dict[str, Any] = {**tiny_models.EXPERTS, "model.expert_bias_rate": 0.05}


def is_frozen(name: str, settings: dict[str, Any]) -> bool:
    """Of patterns without a star."""
    return any(name.startswith(f"{part}.") for part in settings["model.frozen"])


# What is frozen.


def frozen_in(settings: dict[str, Any]) -> set[str]:
    placements = build_model(tiny_run(settings)).placements
    return {name for name, placement in placements.items() if not placement.parameter.trainable}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("embedding", {"embedding.token.weight"}),
        ("embedding.token.weight", {"embedding.token.weight"}),
        ("blocks.*.norm2", {f"blocks.{n}.norm2.weight" for n in range(4)}),
        ("blocks.2.mlp.*.weight", {"blocks.2.mlp.up.weight", "blocks.2.mlp.down.weight"}),
        ("*.norm", {"head.norm.weight"}),
    ],
)
def test_a_pattern_names_parameters_or_the_modules_that_they_lie_in(pattern: str, expected: set[str]) -> None:
    assert frozen_in({"model.frozen": [pattern]}) == expected


def test_a_tied_parameter_is_frozen_by_any_of_its_names() -> None:
    for name in ("embedding", "head.project"):
        assert frozen_in({"model.frozen": [name], "model.tie_embeddings": True}) == {"embedding.token.weight"}


def test_a_module_that_freezes_what_its_plan_trains_is_refused() -> None:
    run = tiny_run({})
    (implementation,) = run.hooks.call.build_model.get_hookimpls()
    original = implementation.function

    def freezing(*arguments: Any) -> Any:
        model = original(*arguments)
        model.module.head.norm.weight.requires_grad_(False)
        return model

    implementation.function = freezing
    with pytest.raises(UsageError, match=r"requires_grad=False on parameter 'head\.norm\.weight', and its plan trains"):
        build_model(run)


def test_a_family_with_a_field_of_that_name_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config(GPT.Config):
        frozen: int = Field(3, description="something else")

    monkeypatch.setattr(GPT, "Config", Config)
    config = tiny_config({"model.frozen": 4})
    assert (config.model.frozen, config.frozen, config.resolved()["model"]["frozen"]) == (4, (), 4)


# One process.


@pytest.mark.parametrize("settings", [FIRST, ALL_BUT_LAST], ids=["first", "all but the last"])
def test_initial_values_and_gradients_are_those_of_the_model_that_trains_everything(settings: dict[str, Any]) -> None:
    found, whole = trained_once(settings)[0], trained_once({})[0]
    assert found.losses[0] == whole.losses[0]
    squares = 0.0
    for name, shape in whole.shapes.items():
        initial = logical_of([found.initial], name, shape)
        assert torch.equal(initial, logical_of([whole.initial], name, shape)), name
        last = logical_of([found.weights], name, shape)
        assert torch.equal(last, initial) == is_frozen(name, settings), name
        assert (name in found.gradients[0]) != is_frozen(name, settings), name
        if name in found.gradients[0]:
            expected = logical_of([whole.gradients[0]], name, shape)
            torch.testing.assert_close(logical_of([found.gradients[0]], name, shape), expected, rtol=EXACT, atol=0)
            squares += float(expected.square().sum())
    trained = [logical_of([whole.gradients[0]], name, shape) for name, shape in whole.shapes.items()]
    norm = sum(float(gradient.square().sum()) for gradient in trained) ** 0.5
    assert found.norms[0] / squares**0.5 == pytest.approx(whole.norms[0] / norm, rel=EXACT)


def test_a_frozen_parameter_has_the_precision_of_the_run_and_nothing_beside_its_values() -> None:
    parts = build(tiny_run({**FIRST, "trainer.precision": "bf16"}))
    frozen = {name for name in parts.model.placements if is_frozen(name, FIRST)}
    assert set(parts.model.frozen) == frozen
    assert {parameter.dtype for parameter in parts.model.frozen.values()} == {torch.bfloat16}
    assert frozen.isdisjoint(parts.model.sinks)
    assert frozen.isdisjoint(piece.name for piece in parts.pieces)
    assert {one.name for one in parts.held()} == set(parts.model.placements)
    for name, parameter in parts.model.parameters().items():
        assert parameter.requires_grad != (name in frozen)
        assert hasattr(parameter, "main_grad") != (name in frozen)


def test_a_frozen_router_keeps_its_balancing_bias() -> None:
    parts = build(tiny_run({**EXPERTS, "model.frozen": ["blocks.0.moe.router"]}))
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    parts.stepper.update(1e-3, 0.0)
    biases = [parts.model.buffers()[f"blocks.{n}.moe.router.bias"] for n in (0, 1)]
    assert [bool(bias.any()) for bias in biases] == [False, True]


# Layouts: suites of strategies and the set `pairs` compare them in fp64.


@pytest.mark.parametrize("case", [FIRST, ALL_BUT_LAST], ids=["first", "all but the last"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["dp2", "zero2", "fsdp2", "tp2", "pp2", "cp2"])
@pytest.mark.wide("precision")
def test_in_low_precision_a_layout_rounds_as_one_process_does(
    layout: str, precision: str, case: dict[str, Any]
) -> None:
    low = {**case, "trainer.precision": precision}
    exact, alone = trained_once(case)[0], trained_once(low)[0]
    assert difference(trained_once({**low, "parallel.layout": layout}), exact, rounding_bound(alone, exact)) == ""


# Pipelines.


def sent_back(settings: dict[str, Any]) -> dict[str, Any]:
    """Be one stage for a step: how many gradients it sends, and whether its forward passes prepare a backward one."""
    parts = build(tiny_run(settings))
    stepper: Any = parts.stepper
    sent, needed = list[int](), list[bool]()
    for peer, wire in stepper.wires.items():
        if peer < stepper.rank:  # where only gradients go
            wire.send = lambda tensors, send=wire.send: (sent.append(len(tensors)), send(tensors))
    run = stepper.model.run

    def watched(batch: Any) -> dict[str, Tensor]:
        values: dict[str, Tensor] = run(batch)
        last = values["hidden"] if "loss" not in values else values["loss"]
        needed.append(last.requires_grad)
        return values

    stepper.model.run = watched
    stepper.forward_backward(parts.train_loader.take(8), 1)
    return {"sent": sum(sent), "needed": any(needed)}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (FIRST, [{"sent": 0, "needed": True}, {"sent": 4, "needed": True}]),
        (ALL_BUT_LAST, [{"sent": 0, "needed": False}, {"sent": 0, "needed": True}]),
        (ONLY_EMBEDDING, [{"sent": 0, "needed": True}, {"sent": 4, "needed": True}]),
    ],
    ids=["first", "all but the last", "only the first"],
)
def test_a_stage_sends_gradients_only_to_where_something_is_trained(
    case: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    assert run_workers(2, sent_back, {**case, "parallel.layout": "pp2"}) == expected


def noted_by_fsdp(settings: dict[str, Any]) -> int:
    """Be one rank for a step and an evaluation: the forward passes that FSDP still remembers."""
    run = tiny_run(settings)
    parts = build(run)
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    noted: int = 0
    for part in parts.model.module.modules():
        if hasattr(part, "_get_fsdp_state") and (group := part._get_fsdp_state()._fsdp_param_group) is not None:
            noted += len(group._post_forward_indices)
    assert evaluate(run, parts) > 0
    return noted


def test_a_stage_without_backward_remembers_no_forward_pass() -> None:
    assert run_workers(4, noted_by_fsdp, {**ALL_BUT_LAST, "parallel.layout": "fsdp2pp2"}) == [0] * 4


# Checkpoints: the set `pairs` resumes under other layouts.


def saved(directory: Path) -> Path:
    return newest(directory / "checkpoints")


def stepped(position: Position) -> Position:
    """After a step, saved."""
    parts: Parts = position.parts
    position.run.step = 1
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    parts.stepper.update(1e-2, 0.1)
    position.save()
    return position


def values_of(position: Position) -> dict[str, Tensor]:
    return {one.name: one.values.clone() for one in position.parts.held()}


def test_what_was_trained_may_be_frozen_from_a_checkpoint_on(tmp_path: Path) -> None:
    wanted = values_of(stepped(position_of({}, tmp_path)))
    resumed = position_of({**FIRST, "trainer.precision": "bf16"}, tmp_path)
    resumed.load(resumed.choose(saved(tmp_path)), ("model.frozen", "trainer.precision"))
    for name, values in values_of(resumed).items():
        kept = wanted[name].bfloat16() if is_frozen(name, FIRST) else wanted[name]
        assert torch.equal(values, kept), name


def test_a_resumed_run_computes_with_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    """In bf16 the weights are apart from the values that are saved."""
    first = stepped(position_of({"trainer.precision": "bf16"}, tmp_path))
    resumed = position_of({"trainer.precision": "bf16"}, tmp_path)
    resumed.load(resumed.choose(saved(tmp_path)))
    weights = dict(resumed.parts.model.module.named_parameters())
    for name, weight in first.parts.model.module.named_parameters():
        assert torch.equal(weights[name], weight), name


def test_a_checkpoint_has_all_parameters_and_no_state_of_frozen_ones_so_that_they_cannot_be_trained_from_it_on(
    tmp_path: Path,
) -> None:
    stepped(position_of(FIRST, tmp_path))
    tensors = read_manifest(saved(tmp_path))["tensors"]
    for name in trained_once({})[0].shapes:
        states = {key.rpartition("/")[2] for key in tensors if key.startswith(f"{name}/")}
        assert "weight" in states
        assert (states == {"weight"}) == is_frozen(name, FIRST), (name, states)
    resumed = position_of({"model.frozen": ["embedding"]}, tmp_path)
    with pytest.raises(UsageError, match=r"model\.frozen: \[.*'blocks\.0'\] -> \['embedding'\]"):
        resumed.load(resumed.choose(saved(tmp_path)))
    said = r"of 'blocks.0.norm1.weight', because the parameter was frozen in that run; add it to model.frozen, or start"
    remedy = " a new run with the weights of the checkpoint: mplug train --set checkpoint.pretrained="
    with pytest.raises(UsageError, match=said + remedy):
        resumed.load(resumed.choose(saved(tmp_path)), ("model.frozen",))


def test_a_checkpoint_without_states_of_another_optimizer_is_told_apart(tmp_path: Path) -> None:
    stepped(position_of({**FIRST, "optimizer.name": "muon"}, tmp_path))
    resumed = position_of(FIRST, tmp_path)
    names = [name for name in read_manifest(saved(tmp_path))["tensors"] if name.startswith("blocks.1.mlp.up.weight/")]
    assert not any(name.endswith("exp_avg") for name in names)
    with pytest.raises(UsageError, match="because another optimizer saved it"):
        resumed.load(resumed.choose(saved(tmp_path)), ("optimizer",))


@pytest.mark.parametrize("case", [FIRST, {}], ids=["frozen", "trained"])
def test_a_new_run_begins_with_the_weights_of_a_run_that_froze_others(case: dict[str, Any], tmp_path: Path) -> None:
    wanted = values_of(stepped(position_of(ALL_BUT_LAST, tmp_path)))
    begun = position_of({**case, "trainer.seed": 77}, tmp_path / "new")
    load_weights(begun.run, begun.parts.model, begun.parts.pieces, saved(tmp_path))
    assert all(torch.equal(values, wanted[name]) for name, values in values_of(begun).items())


# What is told.


def measured(settings: dict[str, Any]) -> dict[str, int]:
    run = tiny_run({"trainer.precision": "bf16", **settings})
    return measure_bytes(run, build_model(run))


def test_bytes_count_frozen_weights_apart_and_give_them_no_master_and_no_state() -> None:
    whole, part = measured({}), measured(FIRST)
    frozen = sum(p.numel for name, p in build_model(tiny_run({})).placements.items() if is_frozen(name, FIRST))
    assert part["frozen weights"] == 2 * frozen
    assert "frozen weights" not in whole
    each = {"weights": 2, "masters": 4, "gradients": 4, "optimizer state": 8}
    for what, size in each.items():
        assert whole[what] - part[what] == pytest.approx(size * frozen, abs=200), what
    divided = measured({**FIRST, "parallel.layout": "fsdp2"})["frozen weights"]
    assert 2 * divided == pytest.approx(part["frozen weights"], abs=300)


def test_explain_tells_frozen_parameters_apart() -> None:
    told = CliRunner().invoke(explain, ["--set", "model.frozen=[embedding, blocks.0]"], catch_exceptions=False).output
    config = resolve(Registry(), default_settings(), {})
    sizes = {name: p.numel for name, p in build_model(prepare(config)).placements.items()}
    frozen = sum(size for name, size in sizes.items() if is_frozen(name, FIRST))
    assert f"{sum(sizes.values()):,} parameters, {frozen:,} of them frozen" in told
    lines = {line.split()[0]: line.split()[-1] for line in told.splitlines() if line.strip()}
    assert lines["embedding.token.weight"] == "frozen"
    assert any(line.split()[:4] == ["blocks.*.mlp.up.weight", "1", "512x128", "mlp"] for line in told.splitlines())
    assert "frozen weights" in told
