"""Expert parallelism passes the suite of strategies, with experts of every kind, and the suite has teeth."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
from torch import Tensor

from mplug import UsageError
from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping
from mplug.distributed.world import World
from mplug.run.prepare import prepare
from mplug.training.job import settle
from mplug_testing import ParallelSuite, run_workers
from mplug_testing.harness import Trace, difference, tiny_config, train_steps
from mplug_testing.parity import require_parity

EXPERTS: dict[str, Any] = {**tiny_models.EXPERTS, "model.qk_norm": True}
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


class TestExpertParallel(ParallelSuite):
    plugin = "ep"
    settings = EXPERTS
    layouts = ("ep2", "ep4")
    variants = {
        "all-gather": GATHERED,
        "everything": EVERYTHING,
        "one-expert-a-rank": {"model.num_experts": 2, "model.num_experts_per_token": 1},
    }
    refused = {"ep8": ("8 data-parallel ranks", "a multiple of 16")}


class TestExpertTensorParallel(ParallelSuite):
    plugin = "etp"
    settings = EXPERTS
    layouts = ("etp2", "ep2etp2")
    variants = {}
    uneven_micro_batches = False  # the same of ep


# Several strategies.

WHOLE_STREAM = "parallel.tp.sequence_parallel=false"
LAYOUTS = (
    "tp2ep4",
    f"tp2ep2etp2 {WHOLE_STREAM}",
    "dp4ep2 parallel.ep.dispatch=all_gather",
)


@pytest.mark.parametrize(("layout", "model"), [(layout, {}) for layout in LAYOUTS], ids=str)
def test_several_strategies_together_give_the_run_of_one_process(layout: str, model: dict[str, Any]) -> None:
    require_parity({**EXPERTS, **model}, layout)


def sums(settings: dict[str, Any]) -> tuple[set[str], int]:
    """Be one rank: the axes over which listeners sum, and how many sums they leave to the host."""
    from mplug.training.assembly import build
    from mplug_testing.harness import tiny_run

    parts = build(tiny_run(settings))
    return parts.model.sinks.reduced_over, len(parts.stepper.reduction.sums)  # type: ignore[attr-defined]


def test_all_gradients_are_summed_while_backward_runs_those_of_experts_over_their_own_ranks() -> None:
    for axes, left in run_workers(4, sums, {**EXPERTS, "parallel.layout": "dp4ep2"}):
        assert axes == {"dp", "sparse_data"}
        assert left == 0


# Planted mistakes.


def router_gradient_stays_local() -> None:
    from dataclasses import replace

    from mplug.layout.plan import Plan

    original = Plan.match

    def match(self: Plan, found: Any) -> dict[str, Any]:
        described = original(self, found)
        return {n: replace(one, over=()) if n.endswith("router.weight") else one for n, one in described.items()}

    Plan.match = match  # type: ignore[method-assign]


def experts_summed_over_the_others_ranks() -> None:
    from mplug.layout.placement import Placement

    Placement.data_axes = property(lambda _: ("dp",))  # type: ignore[assignment, method-assign]


def experts_left_to_themselves() -> None:
    from mplug.layout.placement import Placement

    original = Placement.__dict__["partial_axes"].func

    def partial_axes(self: Placement) -> tuple[str, ...]:
        return tuple(axis for axis in original(self) if axis != "sparse_data")

    Placement.partial_axes = property(partial_axes)  # type: ignore[assignment, method-assign]


def copies_sent_by_all() -> None:
    import mplug_ep.wraps

    mplug_ep.wraps.copying_axes = lambda _: ()


def rows_given_back_in_another_order() -> None:
    import mplug_ep.wraps

    original = mplug_ep.wraps.ops.give_back

    def give_back(rows: Tensor, meeting: Any, *others: Any) -> Tensor:
        return original(rows.roll(1, 0) if len(rows) else rows, meeting, *others)

    mplug_ep.wraps.ops.give_back = give_back  # type: ignore[attr-defined]


MUTATIONS: dict[str, tuple[Callable[[], None], str, dict[str, Any]]] = {
    "the router's gradient is not reduced": (router_gradient_stays_local, "ep2", {}),
    "experts' gradients are summed over the wrong ranks": (experts_summed_over_the_others_ranks, "ep2", {}),
    "experts' gradients are not summed": (experts_left_to_themselves, "dp4ep2", {}),
    "tokens that several ranks have are sent by all": (
        copies_sent_by_all,
        "tp2ep2",
        {"parallel.tp.sequence_parallel": False},
    ),
    "rows come back in another order": (rows_given_back_in_another_order, "ep2", {}),
}


def mutated(settings: dict[str, Any], mutation: str) -> Trace:
    """Be one rank of a run with a planted mistake."""
    return train_steps(settings, MUTATIONS[mutation][0])


@pytest.fixture(scope="module")
def alone() -> Trace:
    """The run of one process."""
    return run_workers(1, train_steps, EXPERTS)[0]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_catches(mutation: str, alone: Trace) -> None:
    _, layout, changes = MUTATIONS[mutation]
    settings = {**EXPERTS, **changes, "parallel.layout": layout}
    ranks = prepare(tiny_config(settings)).mesh.world_size
    assert difference(run_workers(ranks, mutated, settings, mutation), alone)


# Compiled.


# Checkpoints.


# What does not fit.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.name": "gpt", "parallel.layout": "ep2"}, ("ep=2 splits experts", "'gpt' has none", "without ep")),
        ({"model.name": "gpt", "parallel.layout": "tp2etp2"}, ("etp=2 splits experts", "'gpt' has none")),
        (
            {**EXPERTS, "model.num_experts": 6, "parallel.layout": "ep4"},
            ("ep=4 does not divide the 6 expert", "1 or 2 or 3 or 6"),
        ),
        (
            {**EXPERTS, "model.ffn_hidden_size": 25, "parallel.layout": "etp2"},
            ("etp=2 does not divide the 25 expert mlp",),
        ),
        (
            {**EXPERTS, "parallel.layout": "tp2ep2", "parallel.tp.sequence_parallel": False, "trainer.seq_length": 15},
            ("tp=2", "15 tokens of a sample", "trainer.seq_length", "sequence parallelism"),
        ),
        (
            {**EXPERTS, "parallel.layout": "dp2ep4"},
            ("'dp2ep4'", "2 ranks in the view 'dense' and 4 ranks in the view 'sparse'", "4 ranks needs 2 times"),
        ),
        (
            {**EXPERTS, "parallel.layout": "tp2ep4", "parallel.data": None},
            ("'tp2ep4'", "2 times as many data-parallel ranks", "parallel.data is null"),
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_launch_with_its_numbers(changes: dict[str, Any], said: tuple[str]) -> None:
    from mplug.model.build import build_model

    with pytest.raises(UsageError) as caught:
        build_model(prepare(tiny_config(changes)))
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("word", "whole", "ranks"),
    [
        ("ep4", "ep4dp4", 4),
        ("tp2ep4", "tp2ep4dp2", 4),
        ("etp2ep2", "etp2ep2dp4", 4),
        ("dp4ep2etp2", "dp4ep2etp2", 4),
        ("pp2ep2", "pp2ep2dp2", 4),
        ("tp2pp2ep2", "tp2pp2ep2", 4),
        ("ep1", "ep1", 1),
        ("tp4ep2", "tp4ep2", 4),
    ],
)
def test_a_layout_has_the_fewest_ranks_that_every_view_divides(word: str, whole: str, ranks: int) -> None:
    run = prepare(tiny_config({**EXPERTS, "parallel.layout": word}))
    assert (run.config.parallel.layout, run.mesh.world_size) == (whole, ranks)
    assert tiny_config(run.config.resolved()).parallel.layout == whole


@pytest.mark.parametrize(
    ("word", "started", "whole"), [("ep2", 4, "ep2dp4"), ("ep4", 4, "ep4dp4"), ("tp2ep4", 8, "tp2ep4dp4")]
)
def test_of_more_processes_those_that_are_left_are_data_parallel(word: str, started: int, whole: str) -> None:
    overrides = from_mapping(
        {"model": {"name": "mixtral", "num_experts": 4}, "trainer": {"device": "cpu"}, "parallel": {"layout": word}}, ""
    )
    run, _ = settle(default_settings(), overrides, World(0, started, 0, "torchrun"))
    assert (run.config.parallel.layout, run.mesh.world_size) == (whole, started)


def test_processes_that_the_views_do_not_divide_are_refused_with_the_numbers() -> None:
    overrides = from_mapping({"model": {"name": "mixtral"}, "parallel": {"layout": "ep4"}}, "")
    with pytest.raises(UsageError, match=r"'ep4' needs a multiple of 4 processes, and torchrun has started 6"):
        settle(default_settings(), overrides, World(0, 6, 0, "torchrun"))
