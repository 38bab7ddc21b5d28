"""Expert parallelism passes the suite of strategies, with experts of every kind, and the suite has teeth."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
from deep_ep_stand_in import ElasticBuffer, by_stand_in, install
from layout_runs import assert_refused, difference_of, under
from mailboxes import by_messages
from mplug_ep import wraps
from mplug_ep.bounds import Bounds
from mplug_ep.deepep import open_buffer
from torch import Tensor

from mplug import StepResult, UsageError
from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping
from mplug.distributed.world import World
from mplug.layout.placement import Placement
from mplug.layout.plan import Plan
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug.training.job import settle
from mplug_nn import Gating
from mplug_steps import RepeatingStepper
from mplug_testing import ParallelSuite, run_workers
from mplug_testing.harness import Trace, difference, tiny_config, tiny_run, train_steps
from mplug_testing.parity import require_parity

EXPERTS: dict[str, Any] = {**tiny_models.EXPERTS, "model.qk_norm": True}
BOUNDED = {"parallel.ep.dispatch": "bounded", "parallel.ep.room": 4.0}
OVERLAPPED_PARTS = {"parallel.ep.overlap": True, "parallel.ep.parts": 2}
GATHERED = {"parallel.ep.dispatch": "all_gather"}
EVERYTHING = {
    "model.num_experts": 8,
    "model.num_experts_per_token": 3,
    "model.num_dense_layers": 1,
    "model.num_shared_experts": 1,
    "model.shared_expert_gate": True,
    "model.moe_router_score": "sigmoid",
    "model.moe_router_num_groups": 4,
    "model.moe_router_top_groups": 2,
    "model.moe_router_scale": 1.5,
    "model.moe_router_jitter": 0.1,
    "model.moe_balance": "global_batch",
    "model.z_loss_coefficient": 0.01,
    "model.expert_bias_rate": 0.05,
}


@pytest.mark.wide("experts", tests=["test_a_variant_gives_the_run_of_one_process"], quick=["all-gather", "everything"])
@pytest.mark.wide("layouts", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestExpertParallel(ParallelSuite):
    plugin = "ep"
    settings = EXPERTS
    layouts = ("ep2", "ep4")
    variants = {
        "all-gather": GATHERED,
        "bounded": BOUNDED,
        "repeated": {**BOUNDED, "parallel.ep.room": 0.3},
        "once-per-rank": {"parallel.ep.dispatch": "once_per_rank", "model.num_experts_per_token": 3},
        "everything": EVERYTHING,
        "overlapped": {**EVERYTHING, "parallel.ep.overlap": True},
        "parts": {**EVERYTHING, **OVERLAPPED_PARTS, "parallel.ep.parts": 3},
        "one-expert-a-rank": {"model.num_experts": 2, "model.num_experts_per_token": 1},
    }
    without_effect = {
        "room": "a step that has lost rows is computed again, so no result depends on the room",
        "overlap": "it changes when rows travel, not what is computed",
        "parts": "it changes the order in which gradients are summed, not what is computed",
    }
    refused = {"ep8": ("8 data-parallel ranks", "a multiple of 16")}


@pytest.mark.wide("layouts", tests=["test_a_layout_gives_the_run_of_one_process"], quick=["ep2etp2"])
class TestExpertTensorParallel(ParallelSuite):
    plugin = "etp"
    settings = EXPERTS
    layouts = ("etp2", "ep2etp2")
    variants = {}
    uneven_micro_batches = False  # the same of ep


# Several strategies.

REPEATED = "pp2ep2 parallel.pp.schedule=zb-h1 parallel.ep.dispatch=bounded parallel.ep.room=0.6"
IN_PARTS = {
    "zb-h1": "pp2ep2 parallel.pp.schedule=zb-h1 parallel.ep.dispatch=bounded parallel.ep.room=0.6",
    "zb-v": "pp2ep2 parallel.pp.schedule=zb-v model.num_layers=4",
    "dualpipe-v": "pp2ep2 parallel.pp.schedule=dualpipe-v parallel.ep.dispatch=bounded model.num_layers=4",
    "etp": "tp2ep2etp2 parallel.tp.sequence_parallel=false",
    "capacity": "tp2ep4 model.capacity_factor=1.0 trainer.micro_batch_size=2",
    "cp": "cp2ep2 model.moe_balance=micro_batch trainer.micro_batch_size=2 memory.recompute.mode=full",
    "fsdp": "fsdp4ep2",
    "documents": "cp2ep2 parallel.cp.method=all_gather parallel.cp.divide=documents parallel.cp.equal_length=16 "
    "data.documents=5 model.capacity_factor=1.0 model.capacity_dropping=position",
}
"""Layouts in which the parts of a micro batch overlap."""
LAYOUTS = (
    REPEATED,
    "tp2ep4",
    "tp2pp2ep2 parallel.ep.dispatch=bounded parallel.ep.room=0.6",
    "tp2ep2etp2 parallel.tp.sequence_parallel=false",
    "dp4ep2 parallel.ep.dispatch=all_gather",
    *(
        pytest.param(f"{layout} parallel.ep.overlap=true parallel.ep.parts=2", id=f"parts {name}")
        for name, layout in IN_PARTS.items()
    ),
)


@pytest.mark.wide(
    "experts",
    quick=[
        "pp2ep2 parallel.pp.schedule=zb-h1 parallel.ep.dispatch=bounded parallel.ep.room=0.6",
        "tp2ep2etp2 parallel.tp.sequence_parallel=false",
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_strategies_together_give_the_run_of_one_process(layout: str) -> None:
    require_parity(EXPERTS, layout)


def sums(settings: dict[str, Any]) -> tuple[set[str], int]:
    """Be one rank: the axes over which listeners sum, and how many sums they leave to the host."""
    parts = build(tiny_run(settings))
    return parts.model.sinks.reduced_over, len(parts.stepper.reduction.sums)  # type: ignore[attr-defined]


def test_all_gradients_are_summed_while_backward_runs_those_of_experts_over_their_own_ranks() -> None:
    found = run_workers(4, sums, {**EXPERTS, "parallel.layout": "dp4ep2"})
    assert found == [({"dp", "sparse_data"}, 0)] * 4


def rows_by_messages() -> None:
    wraps.open_mailbox = by_messages


@pytest.mark.wide("experts", quick=["lost rows"])
@pytest.mark.parametrize(
    ("room", "parts"), [(4.0, {}), (0.6, {}), (0.6, OVERLAPPED_PARTS)], ids=["room", "lost rows", "lost rows of parts"]
)
def test_rows_that_ranks_write_into_each_others_memory_give_the_run_of_one_process(
    room: float, parts: dict[str, Any]
) -> None:
    symmetric = {"parallel.ep.dispatch": "symmetric", "parallel.ep.room": room, **parts}
    settings = {**EXPERTS, "parallel.layout": "ep2", **symmetric}
    found = run_workers(2, train_steps, settings, rows_by_messages)
    assert difference(found, run_workers(1, train_steps, EXPERTS)[0]) == ""


def test_tokens_that_travel_by_deepep_give_the_run_of_one_process() -> None:
    experts = {**EXPERTS, "model.num_experts_per_token": 3, "model.num_shared_experts": 1}
    settings = {**experts, "parallel.layout": "ep2", "parallel.ep.dispatch": "deepep"}
    found = run_workers(2, train_steps, settings, by_stand_in)
    assert difference(found, run_workers(1, train_steps, experts)[0]) == ""


class WithoutElastic:
    """An older DeepEP."""


@pytest.mark.parametrize(
    ("library", "device", "precision", "words"),
    [
        (None, "cuda", "bf16", "needs the library DeepEP, and Python's package 'deep_ep' is not installed; install it"),
        (WithoutElastic, "cuda", "bf16", "needs version 2 of DeepEP, and the installed 'deep_ep' has no ElasticBuffer"),
        (ElasticBuffer, "cpu", "bf16", "needs GPUs, and this run is on the CPU; use parallel.ep.dispatch=once_per_ra"),
        (ElasticBuffer, "cuda", "fp32", "sends tokens in bf16, and trainer.precision=fp32 computes in float32; use "),
    ],
)
def test_a_run_that_cannot_use_deepep_is_refused_with_the_reason(
    library: type | None, device: str, precision: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library is not None:
        install(library, monkeypatch)
    run = tiny_run({**EXPERTS, "trainer.precision": precision})
    monkeypatch.setattr(run, "device", device)
    with pytest.raises(UsageError, match=rf"parallel\.ep\.dispatch=deepep {words}"):
        open_buffer(run, None)


# Planted mistakes.


def router_gradient_stays_local() -> None:
    original = Plan.match

    def match(self: Plan, found: Any) -> dict[str, Any]:
        described = original(self, found)
        return {n: replace(one, over=()) if n.endswith("router.weight") else one for n, one in described.items()}

    Plan.match = match  # type: ignore[method-assign]


def experts_summed_over_the_others_ranks() -> None:
    Placement.data_axes = property(lambda _: ("dp",))  # type: ignore[assignment, method-assign]


def experts_left_to_themselves() -> None:
    original = Placement.__dict__["partial_axes"].func

    def partial_axes(self: Placement) -> tuple[str, ...]:
        return tuple(axis for axis in original(self) if axis != "sparse_data")

    Placement.partial_axes = property(partial_axes)  # type: ignore[assignment, method-assign]


def copies_sent_by_all() -> None:
    wraps.copying_axes = lambda _: ()


def rows_given_back_in_another_order() -> None:
    original = wraps.ops.give_back

    def give_back(rows: Tensor, meeting: Any, *others: Any) -> Tensor:
        return original(rows.roll(1, 0) if len(rows) else rows, meeting, *others)

    wraps.ops.give_back = give_back  # type: ignore[attr-defined]


def lost_rows_accepted() -> None:
    Bounds.check = _accepting(Bounds.check)  # type: ignore[method-assign]


def _accepting(original: Callable[[Bounds, Run], Callable[[], bool]]) -> Callable[[Bounds, Run], Callable[[], bool]]:
    def check(self: Bounds, run: Run) -> Callable[[], bool]:
        original(self, run)
        return lambda: True

    return check


def hostile(room: float) -> list[float]:
    """Be one rank of a run in which all tokens choose the experts of rank 0: `repeated_steps` after each step."""
    settings = {**EXPERTS, **BOUNDED, "parallel.ep.room": room, "parallel.layout": "ep2"}
    repeated = list[float]()
    original = RepeatingStepper.update

    def update(self: RepeatingStepper, lr: float, weight_decay: float) -> StepResult:
        result = original(self, lr, weight_decay)
        repeated.append(float(result.figures["repeated_steps"]))
        return result

    RepeatingStepper.update = update  # type: ignore[method-assign]
    train_steps(settings, lambda: setattr(Gating, "chosen", _first_experts))
    return repeated


def _first_experts(self: Gating, scores: Tensor) -> Tensor:
    return torch.arange(self.top_k, device=scores.device).expand(*scores.shape[:-1], self.top_k).contiguous()


@pytest.mark.parametrize(("room", "is_repeated"), [(1.5, True), (2.0, False)])
def test_a_hostile_routers_steps_are_repeated_if_a_rank_has_no_room_for_all_rows(
    room: float, is_repeated: bool
) -> None:
    for repeated in run_workers(2, hostile, room):
        assert repeated == [number * is_repeated for number in range(1, len(repeated) + 1)]
        assert repeated


def all_tokens_to_the_first_experts() -> None:
    Gating.chosen = _first_experts  # type: ignore[method-assign]


@cache
def hostile_alone() -> Trace:
    return run_workers(1, train_steps, EXPERTS, all_tokens_to_the_first_experts)[0]


@pytest.mark.wide("experts")
@pytest.mark.parametrize(
    "layout",
    ["ep2", "ep2 parallel.ep.dispatch=bounded", "ep2 parallel.ep.dispatch=all_gather", "ep4", "etp2", "ep2etp2"],
)
def test_a_hostile_routers_run_is_that_of_one_process_though_ranks_receive_no_row(layout: str) -> None:
    settings = under(layout, EXPERTS)
    ranks = run_workers(
        tiny_run(settings).mesh.world_size, train_steps, settings, all_tokens_to_the_first_experts, timeout=120
    )
    assert difference(ranks, hostile_alone()) == ""


MISTAKES: list[tuple[str, Callable[[], None]]] = [
    ("ep2", router_gradient_stays_local),
    ("ep2", experts_summed_over_the_others_ranks),
    ("dp4ep2", experts_left_to_themselves),
    ("tp2ep2 parallel.tp.sequence_parallel=false", copies_sent_by_all),
    ("ep2", rows_given_back_in_another_order),
    ("ep2 parallel.ep.dispatch=bounded parallel.ep.room=0.6", lost_rows_accepted),
]


@pytest.mark.wide("suites", quick=["dp4ep2-experts_left_to_themselves"])
@pytest.mark.parametrize(("layout", "mistake"), MISTAKES, ids=lambda one: getattr(one, "__name__", one))
def test_the_comparison_catches(layout: str, mistake: Callable[[], None]) -> None:
    assert difference_of(layout, EXPERTS, mistake)


# What does not fit.

GPT = {"model.name": "gpt"}
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("ep2", GPT, ("ep=2 splits experts", "'gpt' has none", "without ep")),
    ("tp2etp2", GPT, ("etp=2 splits experts", "'gpt' has none")),
    ("ep4 model.num_experts=6", EXPERTS, ("ep=4 does not divide the 6 expert", "1 or 2 or 3 or 6")),
    ("etp2 model.ffn_hidden_size=25", EXPERTS, ("etp=2 does not divide the 25 expert mlp",)),
    (
        "tp2ep2 parallel.tp.sequence_parallel=false trainer.seq_length=15",
        EXPERTS,
        ("tp=2", "15 tokens of a sample", "trainer.seq_length", "sequence parallelism"),
    ),
    (
        "tp2ep2 parallel.tp.sequence_parallel=false trainer.seq_length=4 parallel.ep.parts=3",
        EXPERTS,
        ("parallel.ep.parts=3 divides", "a rank computes 2 tokens of a sample; use at most 2 parts"),
    ),
    (
        "dp2ep4",
        EXPERTS,
        ("'dp2ep4'", "2 ranks in the view 'dense' and 4 ranks in the view 'sparse'", "4 ranks needs 2 times"),
    ),
    (
        "tp2ep4 parallel.data=null",
        EXPERTS,
        ("'tp2ep4'", "2 times as many data-parallel ranks", "parallel.data is null"),
    ),
]


@pytest.mark.parametrize(("layout", "settings", "words"), REFUSED)
def test_what_does_not_fit_is_refused_before_launch_with_its_numbers(
    layout: str, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert_refused(layout, settings, *words)


@pytest.mark.parametrize(
    ("word", "whole"),
    [
        ("ep4", "ep4dp4"),
        ("tp2ep4", "tp2ep4dp2"),
        ("etp2ep2", "etp2ep2dp4"),
        ("dp4ep2etp2", "dp4ep2etp2"),
        ("pp2ep2", "pp2ep2dp2"),
        ("tp2pp2ep2", "tp2pp2ep2"),
        ("ep1", "ep1"),
        ("tp4ep2", "tp4ep2"),
    ],
)
def test_a_layout_has_the_fewest_ranks_that_every_view_divides(word: str, whole: str) -> None:
    run = prepare(tiny_config({**EXPERTS, "parallel.layout": word}))
    assert (run.config.parallel.layout, run.mesh.world_size) == (whole, 1 if word == "ep1" else 4)
    assert tiny_config(run.config.resolved()).parallel.layout == whole


def started(word: str, processes: int) -> Run:
    """The run that a launcher has started so many processes for."""
    model = {"model": {"name": "mixtral", "num_experts": 4}, "trainer": {"device": "cpu"}}
    overrides = from_mapping({**model, "parallel": {"layout": word}}, "")
    return settle(default_settings(), overrides, World(0, processes, 0, "torchrun"))[0]


@pytest.mark.parametrize(
    ("word", "processes", "whole"), [("ep2", 4, "ep2dp4"), ("ep4", 4, "ep4dp4"), ("tp2ep4", 8, "tp2ep4dp4")]
)
def test_of_more_processes_those_that_are_left_are_data_parallel(word: str, processes: int, whole: str) -> None:
    run = started(word, processes)
    assert (run.config.parallel.layout, run.mesh.world_size) == (whole, processes)


def test_room_without_buffers_of_a_fixed_size_is_refused() -> None:
    settings = {**EXPERTS, "parallel.layout": "ep2", "parallel.ep.room": 2.0}
    with pytest.raises(UsageError, match="room=2 is for dispatch=bounded and symmetric, and dispatch is all_to_all"):
        tiny_config(settings)
    tiny_config({**settings, "parallel.ep.dispatch": "symmetric"})


@pytest.mark.parametrize("dispatch", ["once_per_rank", "deepep", "all_gather"])
def test_parts_that_cannot_travel_while_others_are_computed_are_refused(dispatch: str) -> None:
    with pytest.raises(UsageError, match=f"parts is for .* bounded and symmetric, and dispatch is {dispatch}"):
        tiny_config({**EXPERTS, "parallel.layout": "ep2", "parallel.ep.dispatch": dispatch, "parallel.ep.parts": 2})


def test_processes_that_the_views_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"'ep4' needs a multiple of 4 processes, and torchrun has started 6"):
        started("ep4", 6)
