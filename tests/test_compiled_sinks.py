"""Sinks hold the gradients of one eager process: in compiled units, and of parameters that stages share.

The loss of multi-token prediction, and those of a router, never reach the model's loss: their gradients begin in the
backward pass of their unit. A compiler divides a unit's passes by what depends on the upstream gradient. Everything
else in backward it moves into the forward pass, and with it additions to sinks that other units add to.
"""

import warnings
from functools import cache
from typing import Any

import pytest
from tiny_models import DECODER, LATENT_EXPERTS

from mplug_testing import run_workers
from mplug_testing.harness import Trace, difference, train_ranks, train_steps

Settings = dict[str, Any]
MTP: Settings = {"model.num_layers": 2, "model.num_mtp_layers": 1, "model.mtp_loss_coefficient": 0.5}
ROUTED: Settings = {"model.moe_balance": "sequence", "model.aux_loss_coefficient": 0.5}
LLAMA: Settings = {**DECODER, **MTP, "model.name": "llama"}
DEEPSEEK: Settings = {**LATENT_EXPERTS, **MTP, **ROUTED, "model.name": "deepseek"}
TIED: Settings = {"model.tie_embeddings": True}
MODELS: dict[str, Settings] = {
    "llama": LLAMA,
    "llama, tied": {**LLAMA, **TIED},
    "deepseek": DEEPSEEK,
    "deepseek, tied": {**DEEPSEEK, **TIED},
}


def trained(runs: list[Settings]) -> list[Trace]:
    """Be one rank of several runs, one after the other."""
    warnings.simplefilter("ignore")  # the compiler's own
    return [train_steps(settings) for settings in runs]


def eager_and_compiled(name: str, size: int, layout: str, compiler: str) -> tuple[Trace, list[Trace]]:
    """The eager run of one process, and the compiled run of all ranks."""
    own = {**MODELS[name], "trainer.compile": compiler, "parallel.layout": layout}
    if size == 1:
        ((eager, compiled),) = run_workers(1, trained, [MODELS[name], own])
        return eager, [compiled]
    return run_workers(1, trained, [MODELS[name]])[0][0], [one for (one,) in run_workers(size, trained, [own])]


WIDE = pytest.mark.wide("compile")
OTHERS = [(1, ""), (2, "zero2"), (2, "fsdp2"), (2, "pp2"), (2, "tp2")]
CASES = [
    ("llama", 1, "", "aot_eager"),
    *(
        pytest.param(name, *other, compiler, marks=WIDE)
        for name in MODELS
        for other in OTHERS
        for compiler in ("aot_eager", "inductor")
        if (name, other, compiler) != ("llama", (1, ""), "aot_eager")
    ),
]


@pytest.mark.parametrize(("name", "size", "layout", "compiler"), CASES)
@pytest.mark.wide("compile")
def test_sinks_of_a_compiled_run_hold_the_gradients_of_an_eager_one(
    name: str, size: int, layout: str, compiler: str
) -> None:
    eager, compiled = eager_and_compiled(name, size, layout, compiler)
    assert difference(compiled, eager) == ""


# Stages share the embedding, the last norm and the projection to the vocabulary, each in an order of its own.

PREDICTING: Settings = {
    **DECODER,
    "model.name": "llama",
    "model.num_layers": 4,
    "model.num_mtp_layers": 1,
    "model.mtp_loss_coefficient": 0.5,
}
INTERLEAVED: Settings = {"parallel.pp.schedule": "interleaved"}
UNEVEN: Settings = {"parallel.pp.split": [6, 1]}
BY_LAYOUT = pytest.mark.wide("layouts")
SPLITS = [
    ("pp2", INTERLEAVED),
    ("pp2", UNEVEN),
    *(
        pytest.param(f"pp2{data}2", split, marks=BY_LAYOUT)
        for data in ("zero", "fsdp")
        for split in (INTERLEAVED, UNEVEN)
    ),
]


@cache
def alone(tied: bool) -> Trace:
    return train_steps({**PREDICTING, **TIED} if tied else PREDICTING)


@pytest.mark.parametrize(("layout", "split"), SPLITS)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=BY_LAYOUT)], ids=["tied", "not tied"])
@pytest.mark.wide("compile")
def test_gradients_of_shared_parameters_are_those_of_one_process(layout: str, split: Settings, tied: bool) -> None:
    size = 2 if layout == "pp2" else 4
    model = {**PREDICTING, **(TIED if tied else {})}
    found = train_ranks(size, {**model, **split, "parallel.layout": layout})
    assert difference(found, alone(tied)) == ""
