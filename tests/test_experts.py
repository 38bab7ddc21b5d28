"""Mixtures of experts under layouts: their runs, their balance and what they count are those of one process.

`pytest --wide experts` runs every layout with every way of routing and balancing.
"""

import json
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor

from mplug.checkpoint.states import load_for_inference
from mplug.cli import main
from mplug.gradients.statistics import Statistics
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
WHOLE_STREAM: Settings = {"parallel.tp.sequence_parallel": False}


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


# The comparison.

REFERENCES: dict[str, Seen] = {}


def reference_of(settings: Settings) -> Seen:
    """The same run in one process: made once for every model."""
    key = json.dumps(settings, sort_keys=True)
    if key not in REFERENCES:
        REFERENCES[key] = run_workers(1, watched, settings)[0]
    return REFERENCES[key]


def assert_equal(found: list[Seen], expected: Seen) -> None:
    """The run (see `difference`), counts exactly, and on every rank the states of its own routers."""
    assert difference([one.trace for one in found], expected.trace) == ""
    for seen in found:
        for counted, right in zip(seen.counted, expected.counted, strict=True):
            assert counted.keys() == right.keys()
            for name, value in counted.items():
                exact = name.endswith("load")
                torch.testing.assert_close(value, right[name], rtol=0 if exact else EXACT, atol=0, msg=name)


def assert_same_states(found: list[Seen], expected: Seen) -> None:
    for seen in found:
        assert seen.states.keys() == expected.states.keys()
        for name, state in seen.states.items():
            assert torch.equal(state, expected.states[name]), name


QUICK: list[tuple[str, str, int, Settings, Settings]] = [
    ("plain", "tp2", 2, PLAIN, {}),
    ("fine", "pp2", 2, FINE, {}),
    ("fine", "tp2", 2, FINE, WHOLE_STREAM),
    ("fine", "dp2tp2", 4, FINE, {}),
    ("micro", "dp2tp2", 4, MICRO, {}),
]
KINDS = {"plain": PLAIN, "fine": FINE, "micro": MICRO}
LAYOUTS = [
    ("tp2", 2, {}),
    ("tp2", 2, WHOLE_STREAM),
    ("pp2", 2, {}),
    ("dp2", 2, {}),
    ("tp2pp2", 4, {}),
    ("dp2tp2", 4, {}),
]
WIDE = [(kind, *layout[:2], own, layout[2]) for kind, own in KINDS.items() for layout in LAYOUTS]


def case_of(kind: str, layout: str, ranks: int, own: Settings, changes: Settings, *marks: Any) -> Any:
    name = f"{kind}-{layout}{'-whole-stream' if changes else ''}"
    return pytest.param(layout, ranks, own, changes, id=name, marks=marks)


@pytest.mark.parametrize(
    ("layout", "world_size", "settings", "changes"),
    [
        *(case_of(*case) for case in QUICK),
        *(case_of(*case, pytest.mark.wide("experts")) for case in WIDE if case not in QUICK),
    ],
)
def test_routing_and_every_invariant_balance_give_the_run_and_the_counts_of_one_process(
    layout: str, world_size: int, settings: Settings, changes: Settings
) -> None:
    found = run_workers(world_size, watched, {**settings, **changes, "parallel.layout": layout})
    expected = reference_of(settings)
    assert_equal(found, expected)
    if "pp" not in layout:
        assert_same_states(found, expected)


def test_the_load_is_every_choice_of_every_token_once() -> None:
    for counted in reference_of(FINE).counted:
        assert counted["blocks.1.moe.router.load"].sum() == 8 * 16 * 3, "samples, positions, choices"
        assert "blocks.0.moe.router.load" not in counted, "the first block is dense"
    assert any(bool(state.any()) for name, state in reference_of(FINE).states.items() if name.endswith("bias"))


# Compiled.


@pytest.mark.wide("experts")
def test_compiled_units_with_experts_give_the_eager_run_and_count_alike() -> None:
    compiled = {"trainer.compile": "aot_eager", "parallel.layout": "tp2"}
    found = run_workers(2, watched, {**FINE, **compiled})
    assert_equal(found, reference_of(FINE))
    assert {seen.graphs for seen in found} == {(8, 0)}, "four kinds of units, to train and to evaluate, without a break"


# What a user sees.


@pytest.fixture
def small() -> list[str]:
    own = {name: value for name, value in FINE.items() if name != "model.name"}
    own |= {"trainer.seq_length": 16, "trainer.micro_batch_size": 2, "trainer.global_batch_size": 4}
    own |= {"trainer.steps": 4, "trainer.device": "cpu", "trainer.eval_every": 0}
    given = [word for field, value in own.items() for word in ("--set", f"{field}={str(value).lower()}")]
    return ["--model", "mixtral", "--data", "mock", *given]


CLI = Callable[..., subprocess.CompletedProcess[str]]


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
    ("layout", "whole_stream", "counting"),
    [("tp2", False, {0, 1}), ("tp2", True, {0}), ("dp2tp2", True, {0, 2}), ("dp2", False, {0, 1}), ("pp2", False, {1})],
)
def test_tokens_that_several_ranks_see_are_counted_by_one_of_them(
    layout: str, whole_stream: bool, counting: set[int]
) -> None:
    stream = WHOLE_STREAM if whole_stream else {}
    given = {"parallel.pp.split": [2, 2]} if layout == "pp2" else {}  # the last block is the sparse one
    ranks = ranks_of({**FINE, **stream, **given, "parallel.layout": layout})
    assert {
        run.rank for run, model in ranks if Statistics(run, model.module, model.plan, model.buffer_placements).counted
    } == counting


def test_explain_says_what_of_the_balance_depends_on_the_layout(small: list[str]) -> None:
    def said(*words: str) -> str:
        return CliRunner().invoke(main, ["explain", *small, *words]).output.partition("Depends on the layout\n")[2]

    assert "nothing: the same losses" in said()
    found = said("--set", "model.moe_balance=micro_batch", "--set", "model.capacity_factor=1.5")
    assert "blocks.*.moe.router: the balancing loss covers a micro batch" in found
    assert "blocks.*.moe: experts have room" in found
