"""The bundled optimizers, optimizers of groups and averages under every layout, and resumed under another one.

`pytest --wide reshard` runs all layouts of every optimizer.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from mplug.run.prepare import prepare
from mplug.training.assembly import build
from mplug_saving.folder import newest
from mplug_saving.position import Position
from mplug_testing import run_workers
from mplug_testing.harness import EXACT, as_rank, changed_batches, logical, owned_values, tiny_config
from mplug_validation import evaluated_in_place

RESHARD = pytest.mark.wide("reshard")


# Ten steps, the first five under one layout and the others under another.

STEPS, HALF = 10, 5
SMALL: dict[str, Any] = {
    "model.num_layers": 2,
    "trainer.precision": "fp64",
    "trainer.eval_every": 0,
    "checkpoint.asynchronous": False,
    "parallel.zero.bucket_mib": 0.02,
}
DENSE = ("tp2", "fsdp2", "zero2", "tp2pp2", "tp2zero2", "pp2", "fsdp2tp2", "tp2")
OF_EXPERTS = ("ep2", "etp2", "zero4ep2", "ep2")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.name": "adamw", "optimizer.eps": 1e-3},
    "lion": {"optimizer.name": "lion"},
    "sgd": {"optimizer.name": "sgd"},
    "schedulefree": {"optimizer.name": "schedulefree", "optimizer.eps": 1e-3},
    "muon that clips, offloaded": {
        "optimizer.name": "muon",
        "optimizer.adamw_eps": 1e-3,
        "optimizer.qk_clip": 0.05,
        "optimizer.offload": {"chunk": 5000},
        "model.qk_norm": False,
    },
    "muon": {"optimizer.name": "muon", "optimizer.lr": 5e-3, "optimizer.adamw_eps": 1e-3},
    "muon of heads": {
        "optimizer.name": "muon",
        "optimizer.iteration": "polar_express",
        "optimizer.separate": ["heads", "kv_heads"],
        "optimizer.nesterov": False,
        "optimizer.adamw_eps": 1e-3,
    },
    "adafactor": {"optimizer.name": "adafactor", "optimizer.eps": 1e-6},
    "adafactor of scales": {
        "optimizer.name": "adafactor",
        "optimizer.eps": 1e-6,
        "optimizer.scale_parameter": True,
        "optimizer.beta1": 0.9,
        "optimizer.weight_decay": 0.1,
    },
    "adamw in bf16": {"optimizer.name": "adamw", "optimizer.moments": "bf16", "optimizer.eps": 1e-3},
    "soap": {"optimizer.name": "soap", "optimizer.refresh_every": 3, "optimizer.eps": 1e-3},
    "adamw of 8 bits": {"optimizer.name": "adamw", "optimizer.moments": "8bit", "optimizer.eps": 1e-3},
    "average": {"optimizer.name": "adamw", "optimizer.eps": 1e-3, "optimizer.average": {"decay": 0.75, "start": 2}},
    "optimizers of groups": {
        "optimizer.name": "muon",
        "optimizer.lr": 5e-3,
        "optimizer.average": {"decay": None},
        "optimizer.groups": [
            {"match": ["embedding", "head", "blocks.*.norm1"], "optimizer": {"name": "adamw", "eps": 1e-3}},
            {"match": "blocks.1.attn", "optimizer": {"name": "soap", "lr": 2e-3, "eps": 1e-3}},
            {"match": "blocks.0.attn.out", "optimizer": {"name": "adafactor", "eps": 1e-6}, "lr_scale": 0.5},
            {"match": "blocks.0.attn", "optimizer": {"name": "adamw", "moments": "8bit", "eps": 1e-3}},
        ],
    },
}
QUICK = {("muon", "fsdp2tp2"), ("muon of heads", "etp2"), ("adafactor", "tp2zero2"), ("soap", "zero2")}
QUICK |= {("adamw of 8 bits", "zero2"), ("optimizers of groups", "tp2"), ("average", "fsdp2")}


def steps_of(settings: dict[str, Any], directory: Path, first: int, last: int) -> dict[str, Any]:
    """Be one rank: train from a first step to the last, continue from the directory's checkpoint, and save.

    Returns the weights that the rank owns, and their averages if the optimizer keeps some.
    """
    run = as_rank(prepare(tiny_config(settings), directory=directory))
    run.device = "cpu"
    position = Position(run, build(run))
    if first > 1:
        position.load(position.choose(newest(directory / "checkpoints")))
    for step in range(first, last + 1):
        run.step = step
        position.parts.stepper.forward_backward(changed_batches(position.parts, 8), step)
        position.parts.stepper.update(run.config.optimizer.lr, run.config.optimizer.weight_decay)
    position.save()
    position.saver.wait()
    weights = owned_values(run, position.parts)
    with evaluated_in_place(run, position.parts):
        return weights | {f"average of {name}": boxes for name, boxes in owned_values(run, position.parts).items()}


def all_ranks(settings: dict[str, Any], layout: str, directory: Path, first: int, last: int) -> list[dict[str, Any]]:
    whole = {**SMALL, **settings, "parallel.layout": layout}
    size = prepare(tiny_config(whole)).mesh.world_size
    return run_workers(size, steps_of, whole, directory, first, last)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], dict[str, Any]]:
    """The weights after ten steps of one process, by optimizer, of a model with experts or without."""

    @cache
    def weights(optimizer: str, has_experts: bool) -> dict[str, Any]:
        settings = settings_of(optimizer, has_experts)
        return all_ranks(settings, "", tmp_path_factory.mktemp("alone"), 1, STEPS)[0]

    return weights


def settings_of(optimizer: str, has_experts: bool) -> dict[str, Any]:
    return {**(tiny_models.EXPERTS if has_experts else {}), **OPTIMIZERS[optimizer]}


def chains() -> list[Any]:
    pairs = [*pairwise(DENSE), *pairwise(OF_EXPERTS)]
    return [
        pytest.param(name, *pair, marks=() if (name, pair[0]) in QUICK else RESHARD, id=f"{name} {' '.join(pair)}")
        for name in OPTIMIZERS
        for pair in pairs
    ]


@pytest.mark.parametrize(("optimizer", "layout", "following"), chains())
@pytest.mark.wide("reshard", quick=["average fsdp2 zero2"])
def test_ten_steps_under_two_layouts_give_the_weights_of_one_process(
    alone: Callable[[str, bool], dict[str, Any]], tmp_path: Path, optimizer: str, layout: str, following: str
) -> None:
    settings, expected = settings_of(optimizer, "ep" in layout or "etp" in layout), {}
    all_ranks(settings, layout, tmp_path, 1, HALF)
    found = all_ranks(settings, following, tmp_path, HALF + 1, STEPS)
    expected = alone(optimizer, "ep" in layout or "etp" in layout)
    run = prepare(tiny_config({**SMALL, **settings}))
    for name, placement in build(run).model.placements.items():
        for values in (name, f"average of {name}"):
            one = logical([expected], values, placement.shape)
            error = float((logical(found, values, placement.shape) - one).norm() / one.norm())
            assert error <= EXACT, (values, error)
