"""The same run under layouts of several strategies and other models: it equals that of one process.

Each strategy alone, and beside one other, is run by its own tests, through `ParallelSuite`. And the comparison has
teeth: each planted mistake, made in the workers, is caught.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import SkipTest

import pytest
import torch
from mplug_testing import Fault, ParallelSuite, run_workers
from mplug_testing.harness import Trace, difference, train_steps
from mplug_testing.parity import require_parity
from torch import Tensor


def trained(settings: dict[str, object], mutation: str | None) -> Trace:
    """Be one rank of a run, with a planted mistake."""
    return train_steps(settings, MUTATIONS[mutation] if mutation else None)


# Planted mistakes, made inside the workers before the model is built.


def over_changed(names: tuple[str, ...], over: tuple[str, ...]) -> Callable[[], None]:
    def plant() -> None:
        from dataclasses import replace

        from mplug.layout.plan import Plan

        original = Plan.match

        def match(self: Plan, found: object) -> dict:
            described = original(self, found)  # type: ignore[arg-type]
            return {name: replace(one, over=over) if name.endswith(names) else one for name, one in described.items()}

        Plan.match = match  # type: ignore[method-assign, assignment]

    return plant


def untied() -> None:
    from mplug.model.model import Model

    original = Model.place

    def place(self: Model, mesh: object, stages: object) -> None:
        from dataclasses import replace

        original(self, mesh, stages)  # type: ignore[arg-type]
        for name, placement in self.placements.items():
            over = tuple(axis for axis in placement.parameter.over if axis != "units")
            self.placements[name] = replace(placement, parameter=replace(placement.parameter, over=over))

    Model.place = place  # type: ignore[method-assign, assignment]


def counted_twice() -> None:
    import mplug.training.stepper
    from mplug.gradients.region import region

    def owned(pieces: list, rank: int) -> list[Tensor]:
        return [
            region(piece.gradient, box)
            for piece in pieces
            for box in piece.placement.boxes(rank)
            if min(box.copies) == rank or piece.name == "head.norm.weight"
        ]

    mplug.training.stepper.owned_gradients = owned  # type: ignore[assignment]


def kv_heads_swapped() -> None:
    from mplug.layout.placement import Cut

    original = Cut.range_at

    def range_at(self: Cut, index: int) -> tuple[int, int]:
        size = self.segment.count // self.each * self.copies
        return original(self, size - 1 - index if self.segment.axis == "kv_heads" else index)

    Cut.range_at = range_at  # type: ignore[method-assign]


def micro_batches_averaged() -> None:
    from mplug.model.model import Model

    original = Model.loss

    def loss(self: Model, batch: dict) -> tuple[Tensor, Tensor]:
        total, count = original(self, batch)
        return total / count, torch.ones_like(count)

    Model.loss = loss  # type: ignore[method-assign, assignment]


def off_on_one_rank() -> None:
    import torch.distributed as dist

    from mplug.training.stepper import DefaultStepper

    def loss_gradient(self: DefaultStepper, loss: Tensor) -> Tensor:
        return torch.full_like(loss, 1 + 1e-7 * (dist.get_rank() == 1))

    DefaultStepper.loss_gradient = loss_gradient  # type: ignore[assignment, method-assign]


MUTATIONS: dict[str, Callable[[], None]] = {
    "one rank's gradient is off by 1e-7": off_on_one_rank,
    "norm gradients are not reduced": over_changed(("norm1.weight", "norm2.weight", "norm.weight"), ("batch",)),
    "tied embeddings are not reduced": untied,
    "QK-norm gradients are not reduced": over_changed(("q_norm", "k_norm"), ("batch",)),
    "a parameter counts twice in the norm": counted_twice,
    "two KV heads are swapped": kv_heads_swapped,
    "micro batches are averaged": micro_batches_averaged,
}


# The comparison.


def assert_equal(traces: list[Trace], reference: Trace) -> None:
    """Losses within 1e-10 and, for every parameter, |g - g_ref| <= 1e-10 max(|g_ref|, 1e-3 of the global norm)."""
    assert difference(traces, reference) == ""


REFERENCES: dict[tuple, Trace] = {}


def reference_of(settings: dict[str, object]) -> Trace:
    """The same run in one process: made once for every model."""
    alone = {name: value for name, value in settings.items() if not name.startswith("parallel.")}
    key = tuple(sorted((name, str(value)) for name, value in alone.items()))
    if key not in REFERENCES:
        REFERENCES[key] = run_workers(1, trained, alone, None)[0]
    return REFERENCES[key]


def traces_of(layout: str, world_size: int, changes: dict[str, object], mutation: str | None = None) -> list[Trace]:
    return run_workers(world_size, trained, {**changes, "parallel.layout": layout}, mutation)


WITHOUT_SEQUENCE_PARALLELISM = {"parallel.tp.sequence_parallel": False}
EVERYTHING = {
    "model.position": "learned",
    "model.max_position_embeddings": 16,
    "model.bias": True,
    "model.activation": "swiglu",
    "model.ffn_hidden_size": 64,
    "model.norm": "rmsnorm",
    "model.tie_embeddings": True,
    "model.dropout": 0.1,
}
WIDE = pytest.mark.wide("layouts")
LAYOUTS = [
    ("dp2tp2pp2", 8, {}),
    ("tp4", 4, WITHOUT_SEQUENCE_PARALLELISM),
    pytest.param("dp2tp2", 4, WITHOUT_SEQUENCE_PARALLELISM, marks=WIDE),
    pytest.param("tp2pp2", 4, WITHOUT_SEQUENCE_PARALLELISM, marks=WIDE),
    pytest.param("dp2tp2pp2", 8, WITHOUT_SEQUENCE_PARALLELISM, marks=WIDE),
]
VARIANTS = [
    ("tp4", 4, {"model.num_kv_heads": 1}),
    ("tp2pp2", 4, {**EVERYTHING, "model.num_kv_heads": 1}),
    ("pp4", 4, {"parallel.pp.units_per_stage": [1, 1, 3, 1], "model.tie_embeddings": True}),
    ("tp2", 2, {"kernels.default": "reference", "model.attention_dropout": 0.1, "model.dropout": 0.1}),
    pytest.param("tp4", 4, {"model.num_kv_heads": 1, **WITHOUT_SEQUENCE_PARALLELISM}, marks=WIDE),
    pytest.param("tp4", 4, {"model.num_kv_heads": 4}, marks=WIDE),
    pytest.param("pp4", 4, {"model.tie_embeddings": True}, marks=WIDE),
    pytest.param("dp2pp2", 4, {"model.tie_embeddings": True}, marks=WIDE),
]


@pytest.mark.parametrize(("layout", "world_size", "changes"), LAYOUTS, ids=str)
def test_several_strategies_together_give_the_run_of_one_process(
    layout: str, world_size: int, changes: dict[str, object]
) -> None:
    assert_equal(traces_of(layout, world_size, changes), reference_of(changes))


@pytest.mark.parametrize(("layout", "world_size", "changes"), VARIANTS, ids=str)
def test_every_shape_of_model_gives_the_run_of_one_process(
    layout: str, world_size: int, changes: dict[str, object]
) -> None:
    assert_equal(traces_of(layout, world_size, changes), reference_of(changes))


TEETH = [
    ("norm gradients are not reduced", "tp2", {}),
    ("tied embeddings are not reduced", "pp2", {"model.tie_embeddings": True}),
    ("QK-norm gradients are not reduced", "tp2", WITHOUT_SEQUENCE_PARALLELISM),
    ("a parameter counts twice in the norm", "tp2", {}),
    ("two KV heads are swapped", "tp2", {}),
    ("micro batches are averaged", "dp2", {}),
]


OFF = "one rank's gradient is off by 1e-7"
TEETH += [(OFF, layout, {}) for layout in ("tp2", "zero2")]
MORE_TEETH = [pytest.param(OFF, layout, {}, marks=WIDE) for layout in ("dp2", "pp2", "cp2", "fsdp2")]


@pytest.mark.parametrize(
    ("mutation", "layout", "changes"),
    [*TEETH, *MORE_TEETH],
    ids=[*(f"{what}-{word}" for what, word, _ in TEETH), *(f"{OFF}-{one.values[1]}" for one in MORE_TEETH)],
)
def test_the_comparison_catches(mutation: str, layout: str, changes: dict[str, object]) -> None:
    traces = traces_of(layout, 2, changes, mutation)
    with pytest.raises(AssertionError):
        assert_equal(traces, reference_of(changes))


def test_an_error_of_1e_7_in_the_gradient_of_any_parameter_is_seen() -> None:
    reference = reference_of({})
    for name in reference.shapes:
        wrong = [(start, values * (1 + 1e-7)) for start, values in reference.gradients[0][name]]
        gradients = [{**reference.gradients[0], name: wrong}, *reference.gradients[1:]]
        assert f"gradient of '{name}'" in difference([replace(reference, gradients=gradients)], reference)


def test_a_run_that_one_process_refuses_is_a_fault_and_no_layout_to_skip() -> None:
    for layout in ("", "dp2"):
        with pytest.raises(Fault, match=r"the run is refused in one process.*num_attention_heads=3 does not divide"):
            require_parity({"model.num_attention_heads": 3}, layout)


def test_a_suite_skips_a_run_that_its_ranks_refuse_where_it_is_tried_unasked(text_file: Path) -> None:
    """One that the author asks for is a fault."""
    small = {"data.name": "text", "data.path": str(text_file), "model.vocab_size": 100}
    remedies = ("", "; set .* that are not refused")
    reason, asked = (f"is refused{remedy}: .*the data has tokens up to 255" for remedy in remedies)

    class DataParallel(ParallelSuite):
        plugin = "dp"
        settings = small

    with pytest.raises(SkipTest, match=f"^layout 'dp2' {reason}"):
        require_parity(small, "dp2", named_by_author=False)
    with pytest.raises(Fault, match=f"^layout 'dp2' {asked}"):
        require_parity(small, "dp2")
    with pytest.raises(Fault, match=f"^under layout 'dp2' the run {asked}"):
        DataParallel().test_a_layout_gives_the_run_of_one_process("dp2")
    with pytest.raises(SkipTest, match=f"^under layout 'dp2pp2' the run {reason}"):
        DataParallel().test_a_layout_gives_the_run_of_one_process("dp2pp2")
