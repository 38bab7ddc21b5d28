"""Groups of parameters with rates or optimizers of their own (`optimizer.groups`).

The set `pairs` compares further layouts and optimizers with one process.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from mplug_adamw import AdamW
from mplug_explain.command import command as explain
from pydantic import Field
from tiny_runs import position_of
from torch import Tensor

from mplug import UsageError, hookimpl
from mplug.model.build import build_model
from mplug.model.single_optimizer import build_optimizer
from mplug.registry.entry_points import Registry
from mplug.run.record import provenance
from mplug.training.assembly import build
from mplug_estimates import measure_bytes
from mplug_saving.folder import newest
from mplug_settings import config_schema
from mplug_testing import run_workers
from mplug_testing.harness import EXACT, logical, owned_values, tiny_config, tiny_run
from mplug_testing.parity import require_parity, trained_once

EMBEDDING: dict[str, Any] = {"match": "embedding", "lr_scale": 0.1, "weight_decay_scale": 0.0}
PRODUCTS: dict[str, Any] = {"match": ["blocks.*.attn.qkv", "blocks.*.mlp"], "lr_scale": 3.0}
SECOND: dict[str, Any] = {"match": "blocks.1", "weight_decay_scale": 2.0}
GROUPS: dict[str, Any] = {"optimizer.groups": [EMBEDDING, PRODUCTS, SECOND]}
LR, DECAY, STEPS = 1e-2, 0.3, 4


def refusal(settings: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as raised:
        build_model(tiny_run(settings))
    return str(raised.value)


# What a group is.


def test_the_first_group_that_matches_a_parameter_applies() -> None:
    groups = build_model(tiny_run(GROUPS)).groups
    assert groups["embedding.token.weight"] == 0
    assert groups["blocks.1.mlp.up.weight"] == 1
    assert groups["blocks.1.norm1.weight"] == 2
    assert not {"blocks.0.norm1.weight", "head.project.weight"} & groups.keys()


def test_a_pattern_that_matches_nothing_is_refused_with_a_similar_name() -> None:
    found = refusal({"optimizer.groups": [EMBEDDING, {"match": ["head", "blocks.*.atn"], "lr_scale": 2.0}]})
    assert found.startswith("optimizer.groups.1 (the suite's settings): 'blocks.*.atn' matches no parameter")
    assert re.search(r"did you mean 'blocks\.\d\.attn'", found)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"optimizer.groups": [EMBEDDING, EMBEDDING]}, r"groups\.1 .* no effect: .* or belongs to an earlier group"),
        (
            {"optimizer.groups": [EMBEDDING], "model.frozen": ["embedding"]},
            r"groups\.0 .* every parameter .* is frozen",
        ),
        ({"optimizer.groups": [{**EMBEDDING, "lr_scale": 0}]}, r"optimizer\.groups\.0\.lr_scale"),
        ({"optimizer.groups": [{"lr_scale": 2}]}, r"optimizer\.groups\.0\.match"),
        ({"optimizer.groups": [{"match": []}]}, r"optimizer\.groups\.0\.match"),
        ({"optimizer.groups": [{**EMBEDDING, "lr": 1e-3}]}, r"optimizer\.groups\.0\.lr"),
    ],
)
def test_a_group_without_an_effect_or_with_wrong_fields_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        build_model(tiny_run(settings))


def test_a_tied_parameter_has_the_group_of_any_of_its_names_and_not_of_two() -> None:
    tied = {"model.tie_embeddings": True}
    for name in ("embedding", "head.project"):
        groups = build_model(tiny_run({**tied, "optimizer.groups": [{**EMBEDDING, "match": name}]})).groups
        assert groups == {"embedding.token.weight": 0}
    both = {"optimizer.groups": [EMBEDDING, {"match": "head", "lr_scale": 2.0}]}
    assert "'head.project.weight' of group 1 are one tied parameter" in refusal({**tied, **both})


def test_an_optimizer_that_keeps_something_for_the_whole_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(self: AdamW) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(AdamW, "state", hookimpl(state), raising=False)
    of_a_group = {"optimizer.name": "sgd", "optimizer.groups": [ADAMW]}
    for settings in (GROUPS, of_a_group):
        assert "an optimizer for each group, and optimizers/adamw keeps something" in refusal(settings)
    build_model(tiny_run({}))


def test_an_optimizer_with_a_field_of_that_name_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config(AdamW.Config):
        groups: int = Field(3, description="something else")

    monkeypatch.setattr(AdamW, "Config", Config)
    config = tiny_config({"optimizer.groups": 4})
    assert (config.optimizer.groups, config.groups, config.resolved()["optimizer"]["groups"]) == (4, (), 4)


# What it computes.


def plain_adamw(weights: Mapping[str, Tensor], groups: list[list[str]], rates: list[tuple[float, float]]) -> Any:
    """Torch's AdamW with parameter groups, of copies of the weights; a rate is an fp32 number in both."""
    copies = {name: torch.nn.Parameter(one.clone()) for name, one in weights.items()}
    of_torch = []
    for names, (lr, decay) in zip(groups, rates, strict=True):
        for dims in (1, 2):
            own = [copies[name] for name in names if min(copies[name].dim(), 2) == dims]
            rate = float(torch.tensor(float(torch.tensor(LR)) * lr))
            strength = float(torch.tensor(float(torch.tensor(DECAY)) * decay)) if dims == 2 else 0.0
            of_torch.append({"params": own, "lr": rate, "weight_decay": strength})
    return copies, torch.optim.AdamW([one for one in of_torch if one["params"]], betas=(0.9, 0.95), eps=1e-8)


def test_weights_are_those_of_torch_with_parameter_groups() -> None:
    fp64 = {"trainer.precision": "fp64", "trainer.max_grad_norm": 0.0}
    with_groups, without = build(tiny_run({**fp64, **GROUPS})), build(tiny_run(fp64))
    groups = with_groups.model.groups
    masters = {piece.name: piece.master for piece in without.pieces}
    named = [[name for name in masters if groups.get(name, -1) == number] for number in (-1, 0, 1, 2)]
    rates = [(1.0, 1.0), (0.1, 0.0), (3.0, 1.0), (1.0, 2.0)]
    assert all(named)
    copies, optimizer = plain_adamw(masters, named, rates)
    for step in range(1, STEPS + 1):
        for parts in (with_groups, without):
            parts.stepper.forward_backward(parts.train_loader.take(8), step)
        for piece in without.pieces:
            copies[piece.name].grad = piece.gradient / (8 * 16)
        with_groups.stepper.update(LR, DECAY)
        optimizer.step()
        for name, master in masters.items():
            master.copy_(copies[name].detach())
    for piece in with_groups.pieces:
        torch.testing.assert_close(piece.master, copies[piece.name].detach(), rtol=EXACT, atol=EXACT)


TIED: dict[str, Any] = {"model.tie_embeddings": True, "optimizer.groups": [EMBEDDING, PRODUCTS]}
EXPERTS: dict[str, Any] = {
    **tiny_models.EXPERTS,
    "optimizer.groups": [{"match": "blocks.*.moe.experts", "lr_scale": 0.5}, EMBEDDING],
}
SGD, MUON = {"optimizer.name": "sgd"}, {"optimizer.name": "muon"}


@pytest.mark.parametrize(
    ("layout", "settings"),
    [("zero2", GROUPS), ("tp2", GROUPS), ("pp2", TIED)],
    ids=["zero2", "tp2", "pp2 tied"],
)
@pytest.mark.wide("reshard")
def test_a_layout_gives_the_weights_of_one_process(layout: str, settings: dict[str, Any]) -> None:
    require_parity(settings, layout)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon", "sgd"])
@pytest.mark.wide("layouts", quick=["adamw", "muon"])
def test_every_optimizer_updates_a_group_by_its_own_rates(optimizer: str) -> None:
    """A group is updated as the whole model is with the group's rates: one update from the same gradients."""

    def updated(settings: dict[str, Any], lr: float, decay: float) -> tuple[dict[str, int], dict[str, Tensor]]:
        fp64 = {"trainer.precision": "fp64", "optimizer.name": optimizer, "model.num_layers": 2}
        parts = build(tiny_run({**fp64, **settings}))
        parts.stepper.forward_backward(parts.train_loader.take(8), 1)
        parts.stepper.update(lr, decay)
        return dict(parts.model.groups), {piece.name: piece.master for piece in parts.pieces}

    groups, found = updated(GROUPS, 0.125, 0.25)
    for number, rates in {-1: (0.125, 0.25), 0: (0.0125, 0.0), 1: (0.375, 0.25), 2: (0.125, 0.5)}.items():
        _, whole = updated({}, *rates)
        for name in whole:
            if groups.get(name, -1) == number:
                torch.testing.assert_close(found[name], whole[name], rtol=EXACT, atol=EXACT, msg=name)


# Optimizers of groups.

LION: dict[str, Any] = {"name": "lion", "lr": 0.25 * LR, "weight_decay": 0.6, "beta2": 0.9}
ADAMW: dict[str, Any] = {"match": ["embedding", "head", "blocks.*.norm1"], "optimizer": {"name": "adamw", "lr": LR}}
MIXED: dict[str, Any] = {
    "optimizer.name": "muon",
    "optimizer.lr": LR,
    "optimizer.iteration": "quintic",
    "optimizer.groups": [
        ADAMW,
        {"match": "blocks.1.attn", "optimizer": {"name": "soap", "lr": 0.5 * LR}},
        {"match": "blocks.1.mlp", "optimizer": {"name": "adafactor", "weight_decay": 0.2}, "lr_scale": 0.5},
    ],
}
"""Muon beside three other optimizers."""


def test_the_optimizer_of_a_group_updates_it_as_it_would_the_whole_model() -> None:
    """Lion and AdamW are of elements: a group is updated as by a run of its optimizer, with the same gradients."""
    fp64 = {"trainer.precision": "fp64", "trainer.max_grad_norm": 0.0}
    own = {"optimizer.groups": [{"match": "blocks.0", "optimizer": LION}, {**ADAMW, "weight_decay_scale": 0.5}]}
    sgd = {"optimizer.name": "sgd", "optimizer.lr": LR, "optimizer.weight_decay": DECAY}
    parts = build(tiny_run({**fp64, **sgd, **own}))
    alone = {
        0: (build(tiny_run({**fp64, **{f"optimizer.{name}": value for name, value in LION.items()}})), LION["lr"], 0.6),
        1: (build(tiny_run({**fp64, "optimizer.name": "adamw"})), LR, 0.05),
        -1: (build(tiny_run({**fp64, **sgd})), LR, DECAY),
    }
    for step in range(1, STEPS + 1):
        for one, lr, decay in ((parts, LR, DECAY), *alone.values()):
            one.stepper.forward_backward(one.train_loader.take(8), step)
            one.stepper.update(lr, decay)
        found = {piece.name: piece.master for piece in parts.pieces}
        for number, (one, _, _) in alone.items():
            for piece in one.pieces:
                if parts.model.groups.get(piece.name, -1) == number:
                    expected = piece.master
                    torch.testing.assert_close(found[piece.name], expected, rtol=1e-6, atol=1e-7, msg=piece.name)
                piece.master.copy_(found[piece.name])
            one.model.weights_written()


@pytest.mark.parametrize(
    "settings",
    [
        *({"optimizer.name": "adamw", "optimizer.moments": moments} for moments in ("bf16", "8bit")),
        *({"optimizer.name": name} for name in ("schedulefree", "adafactor")),
        {"optimizer.average": {"decay": 0.5}},
    ],
    ids=str,
)
def test_an_optimizer_counts_on_the_device_of_the_run_also_without_pieces(settings: dict[str, Any]) -> None:
    """A stage, or a rank of ZeRO, may have none of a group; the scalars of a step are on the device of the others."""
    run = tiny_run(settings)
    model = build_model(run)
    run.device = "meta"
    numbers = [one for one in vars(build_optimizer(run, model, [])).values() if isinstance(one, Tensor)]
    assert {one.device.type for one in numbers} == {"meta"}


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        ({"name": "adamv"}, r"optimizer\.groups\.0\.optimizer\.name .*adamv.* did you mean 'adamw'"),
        ({"name": "adamw", "beta3": 1}, r"optimizer\.groups\.0\.optimizer\.beta3"),
        ({"lr": 1}, r"optimizer\.groups\.0\.optimizer\.name .*is required: the name of an optimizer"),
        ("adamw", r"optimizer\.groups\.0\.optimizer .*must be a section"),
    ],
)
def test_a_wrong_section_of_an_optimizer_is_refused_with_its_field(optimizer: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        tiny_run({"optimizer.groups": [{"match": "embedding", "optimizer": optimizer}]})


def test_a_decay_that_grows_from_zero_is_no_factor_for_a_group() -> None:
    group = {"match": "embedding", "optimizer": {"name": "adamw"}}
    zero = {"optimizer.groups": [group], "optimizer.weight_decay": 0.0}
    growing = {"schedule.weight_decay.name": "linear", "schedule.weight_decay.end": 0.1}
    assert "gives no factor for the weight decay 0.1 of optimizers/adamw" in refusal({**zero, **growing})
    build_model(tiny_run(zero))


def test_the_record_names_the_optimizers_of_groups() -> None:
    named = [one["plugin"] for one in provenance(tiny_run(MIXED))["plugins"]]
    assert {"optimizers/muon", "optimizers/adamw", "optimizers/soap", "optimizers/adafactor"} <= set(named)


# Checkpoints and reports.


def test_a_checkpoint_is_read_with_the_same_groups_and_with_others_if_the_user_allows_it(tmp_path: Path) -> None:
    position = position_of(GROUPS, tmp_path)
    position.run.step = 1
    position.parts.stepper.forward_backward(position.parts.train_loader.take(8), 1)
    position.parts.stepper.update(LR, DECAY)
    position.save()
    path = newest(tmp_path / "checkpoints")
    assert path is not None
    for settings, allowed in ((GROUPS, ()), ({}, ("optimizer.groups",))):
        resumed = position_of(settings, tmp_path)
        if allowed:
            with pytest.raises(UsageError, match=r"optimizer\.groups: .*embedding.* -> \[\]"):
                resumed.load(resumed.choose(path))
        resumed.load(resumed.choose(path), allowed)
        saved = {piece.name: piece for piece in position.parts.pieces}
        for piece in resumed.parts.pieces:
            assert torch.equal(piece.master, saved[piece.name].master)
            for name, state in resumed.parts.optimizer.state(piece).items():
                assert torch.equal(state, position.parts.optimizer.state(saved[piece.name])[name]), (piece.name, name)


def second_step(settings: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Be one rank that resumes after the first step: the weights that it owns after the second."""
    position = position_of(settings, directory)
    path = newest(directory / "checkpoints")
    assert path is not None
    position.load(position.choose(path))
    position.parts.stepper.forward_backward(position.parts.train_loader.take(8), 2)
    position.parts.stepper.update(LR, DECAY)
    return owned_values(position.run, position.parts)


@pytest.mark.wide("reshard")
def test_a_run_resumes_under_another_layout(tmp_path: Path) -> None:
    fp64 = {**GROUPS, "trainer.precision": "fp64"}
    position = position_of(fp64, tmp_path)
    position.run.step = 1
    position.parts.stepper.forward_backward(position.parts.train_loader.take(8), 1)
    position.parts.stepper.update(LR, DECAY)
    position.save()
    (alone,) = run_workers(1, second_step, fp64, tmp_path)
    divided = run_workers(2, second_step, {**fp64, "parallel.layout": "zero2"}, tmp_path)
    for name, placement in position.parts.model.placements.items():
        expected = logical([alone], name, placement.shape)
        torch.testing.assert_close(logical(divided, name, placement.shape), expected, rtol=EXACT, atol=EXACT)


def test_groups_cost_no_memory() -> None:
    one, other = (measure_bytes(run, build_model(run)) for run in (tiny_run(GROUPS), tiny_run({})))
    assert one == other


def test_the_memory_of_groups_is_that_of_their_optimizers() -> None:
    """SGD with momentum keeps one value of an element, AdamW two and a number."""
    sgd = {"optimizer.name": "sgd", "optimizer.momentum": 0.9}
    run = tiny_run({**sgd, "optimizer.groups": [ADAMW]})
    model = build_model(run)
    with_groups, plain = measure_bytes(run, model), measure_bytes(tiny_run(sgd), build_model(tiny_run(sgd)))
    own = [model.placements[name] for name in model.groups]
    added = 4 * (sum(one.numel for one in own) + len(own))
    assert with_groups["optimizer state"] - plain["optimizer state"] == added


def test_explain_shows_the_factors_of_each_parameter() -> None:
    own = "{match: blocks.*.norm1, lr_scale: 2, optimizer: {name: lion, lr: 1e-4}}"
    groups = f"optimizer.groups=[{{match: embedding, lr_scale: 0.1, weight_decay_scale: 0}}, {own}]"
    told = CliRunner().invoke(explain, ["--set", groups], catch_exceptions=False).output
    lines = {line.split()[0]: line for line in told.splitlines() if line.strip()}
    assert lines["embedding.token.weight"].endswith("group 0: lr x 0.1, decay x 0")
    assert lines["blocks.*.norm1.weight"].endswith("group 1: lion, lr 0.0002, decay 1")
    assert lines["head.norm.weight"].endswith("-")


def test_the_schema_of_a_config_has_the_groups() -> None:
    found = config_schema(Registry(), {"model": "gpt", "optimizer": "adamw", "data": "mock"})
    (section,) = (one for name, one in found["$defs"].items() if name == "ParameterGroup")
    assert set(section["properties"]) == {"match", "lr_scale", "weight_decay_scale", "optimizer"}


def test_groups_of_equal_rates_are_the_run_without_groups() -> None:
    neutral = {"optimizer.groups": [{"match": "embedding"}]}
    found, plain = trained_once(neutral)[0], trained_once({})[0]
    assert found.losses == plain.losses
