"""Mixtures of experts under layouts: their runs, their balance and what they count are those of one process.

`pytest --wide experts` runs every layout with every way of routing and balancing.
"""

import json
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from command_line import Cli
from layout_words import WHOLE_STREAM, layouts, under
from safetensors.torch import load_file
from torch import Tensor

from mplug.cli import main
from mplug_pretrained.inference import load_for_inference
from mplug_steps import Statistics
from mplug_testing import run_workers
from mplug_testing.harness import EXACT, Trace, difference, tiny_run, train_steps
from mplug_testing.layouts import ranks_of

Settings = dict[str, Any]
TINY: Settings = {**tiny_models.EXPERTS, "model.ffn_hidden_size": 32, "model.aux_loss_coefficient": 0.1}
PLAIN: Settings = {**TINY, "model.z_loss_coefficient": 0.01, "model.moe_router_jitter": 0.1}
FINE: Settings = {
    **TINY,
    "model.num_experts": 8,
    "model.num_experts_per_token": 3,
    "model.num_dense_layers": 1,
    "model.num_shared_experts": 2,
    "model.shared_expert_gate": True,
    "model.moe_router_score": "sigmoid",
    "model.moe_router_num_groups": 4,
    "model.moe_router_top_groups": 2,
    "model.moe_router_scale": 1.5,
    "model.moe_balance": "global_batch",
    "model.expert_bias_rate": 0.05,
}
MICRO: Settings = {**TINY, "model.moe_balance": "micro_batch"}


@dataclass
class Seen:
    """What a rank saw: the run, what was counted in each step over all ranks, and the routers' states at the end.

    `graphs` are how many were compiled, and how many breaks there were in them.
    """

    trace: Trace
    counted: list[dict[str, Tensor]]
    states: dict[str, Tensor]
    graphs: tuple[int, int]


def watched(settings: Settings) -> Seen:
    """Be one rank of a run."""
    from torch._dynamo.utils import counters

    counted, states = list[dict[str, Tensor]](), dict[str, Tensor]()
    warnings.simplefilter("ignore")  # torch's own, as it traces

    def before() -> None:
        finish, tell = Statistics.finish, Statistics.tell

        def finish_and_note(self: Statistics, num_targets: Tensor, num_tokens: Tensor) -> dict[str, Tensor]:
            counted.append(finish(self, num_targets, num_tokens))
            return counted[-1]

        def tell_and_note(self: Statistics, skip: Tensor) -> None:
            tell(self, skip)
            states.update({f"{n}.{k}": b.clone() for n, part in enumerate(self.learners) for k, b in saved(part)})

        Statistics.finish, Statistics.tell = finish_and_note, tell_and_note  # type: ignore[method-assign]

    trace = train_steps(settings, before)
    graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return Seen(trace, counted, states, graphs)


def saved(part: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in part.named_buffers() if name in ("bias", "last_load")]


ROOM: Settings = {**TINY, "model.capacity_factor": 1.0}
BALANCED: Settings = {**PLAIN, "model.moe_router_score": "sinkhorn"}
LATENT: Settings = {**FINE, "model.moe_latent_size": 12}
KINDS = {"plain": PLAIN, "fine": FINE, "micro": MICRO, "room": ROOM, "balanced": BALANCED, "latent": LATENT}


@cache
def alone(kind: str) -> Seen:
    return run_workers(1, watched, KINDS[kind])[0]


def assert_equal(found: list[Seen], expected: Seen, stages: bool = False) -> None:
    """The run (see `difference`), counts exactly, and without stages the states of the routers on every rank."""
    assert difference([one.trace for one in found], expected.trace) == ""
    for seen in found:
        for counted, right in zip(seen.counted, expected.counted, strict=True):
            assert counted.keys() == right.keys()
            for name, value in counted.items():
                exact = name.endswith("load")
                torch.testing.assert_close(value, right[name], rtol=0 if exact else EXACT, atol=0, msg=name)
        if not stages:
            torch.testing.assert_close(seen.states, expected.states, rtol=0, atol=0)


STREAM = f"tp2 {WHOLE_STREAM}"
QUICK = ["plain-tp2", "fine-pp2", f"fine-{STREAM}", "fine-dp2tp2", "micro-dp2tp2"]
ALL = [f"{kind}-{layout}" for kind in KINDS for layout in ("tp2", STREAM, "pp2", "dp2", "tp2pp2", "dp2tp2")]
ALL += [f"{kind}-{layout}" for kind in ("room", "balanced") for layout in ("cp2", "tp2cp2")]
ALL += [f"{kind}-{layout}" for kind in ("balanced", "latent") for layout in ("ep2", "etp2", "fsdp2", "cp2ep2")]


@pytest.mark.parametrize("case", layouts(QUICK, [one for one in ALL if one not in QUICK], "experts"))
@pytest.mark.wide("experts", quick=["fine-pp2"])
def test_routing_and_every_invariant_balance_give_the_run_and_the_counts_of_one_process(case: str) -> None:
    kind, _, layout = case.partition("-")
    ranks, settings = under(KINDS[kind], layout)
    assert_equal(run_workers(ranks, watched, settings), alone(kind), "pp" in layout)


def test_the_load_is_every_choice_of_every_token_once() -> None:
    for counted in alone("fine").counted:
        assert counted["blocks.1.moe.router.load"].sum() == 8 * 16 * 3, "samples, positions, choices"
        assert "blocks.0.moe.router.load" not in counted, "the first block is dense"
    assert any(bool(state.any()) for name, state in alone("fine").states.items() if name.endswith("bias"))


@pytest.mark.wide("experts")
@pytest.mark.parametrize(("kind", "units"), [("fine", 4), ("room", 3), ("balanced", 3), ("latent", 4)])
def test_compiled_units_with_experts_give_the_eager_run_and_count_alike(kind: str, units: int) -> None:
    found = run_workers(2, watched, {**KINDS[kind], "trainer.compile": "aot_eager", "parallel.layout": "tp2"})
    assert_equal(found, alone(kind))
    assert {seen.graphs for seen in found} == {(2 * units, 0)}, "each kind, to train and to evaluate, without a break"


@pytest.fixture
def small(tiny: list[str]) -> list[str]:
    own = {name: value for name, value in FINE.items() if name != "model.name"} | {"trainer.seq_length": 16}
    given = [word for field, value in own.items() for word in ("--set", f"{field}={str(value).lower()}")]
    return ["--model", "mixtral", "--data", "mock", *tiny, *given]


CLI = Cli


def test_metrics_hold_the_load_and_resuming_and_inference_have_the_bias(
    cli: CLI, small: list[str], tmp_path: Path
) -> None:
    for name, steps in (("whole", 4), ("part", 2), ("part", 4)):
        again = ["--resume"] if (name, steps) == ("part", 4) else []
        stopped = ["--set", f"trainer.steps={steps}"]
        finished = cli("train", *small, *stopped, "--name", name, *again)
        assert finished.returncode == 0, finished.stderr
    whole, part = (
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "part")
    )
    for one, other in zip(whole, part, strict=True):
        assert one["loss"] == other["loss"]
        assert one["statistics"] == other["statistics"]
        assert sum(one["statistics"]["blocks.1.moe.router.load"]) == 4 * 16 * 3
        uneven, z_loss = one["statistics"]["blocks.1.moe.router.losses"]
        assert 0.9 < uneven < 2, "E sum f p a token: 1 where all experts are chosen equally often"
        assert z_loss > 0
    path = tmp_path / "runs" / "part" / "checkpoints" / "step_00000004"
    bias = load_for_inference(tiny_run(FINE), path).states()["blocks.1.moe.router.bias"]
    saved = load_file(path / "rank00000.safetensors")
    assert bias.any()
    assert any(name.startswith("blocks.1.moe.router.bias") and torch.equal(bias, saved[name]) for name in saved)


@pytest.mark.parametrize(
    ("layout", "counting"),
    [
        ("tp2", {0, 1}),
        (STREAM, {0}),
        (f"dp2tp2 {WHOLE_STREAM}", {0, 2}),
        ("dp2", {0, 1}),
        ("pp2 parallel.pp.split=[2,2]", {1}),  # the last block is the sparse one
    ],
)
def test_tokens_that_several_ranks_see_are_counted_by_one_of_them(layout: str, counting: set[int]) -> None:
    found = set()
    for run, model in ranks_of(under(FINE, layout)[1]):
        if Statistics(run, model.module, model.plan, model.buffer_placements).counted:
            found.add(run.rank)
    assert found == counting


def test_explain_says_what_of_the_balance_depends_on_the_layout(small: list[str]) -> None:
    def said(*words: str) -> str:
        return CliRunner().invoke(main, ["explain", *small, *words]).output.partition("Depends on the layout\n")[2]

    assert "nothing: the same losses" in said()
    found = said("--set", "model.moe_balance=micro_batch", "--set", "model.capacity_factor=1.5")
    assert "blocks.*.moe.router: the balancing loss covers a micro batch" in found
    assert "blocks.*.moe: experts have room" in found
