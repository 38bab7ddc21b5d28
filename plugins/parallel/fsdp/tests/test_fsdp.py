"""Fully sharded data parallelism passes the suite of strategies; and the comparison catches what could go wrong."""

import os
import warnings
from dataclasses import replace
from typing import Any

import mplug_dp.buckets
import pytest
import torch
from layout_runs import assert_refused, difference_of
from mplug_fsdp import gathered, units
from tiny_models import EXPERTS
from torch import Tensor

import mplug_ops as ops
from mplug.gradients.sinks import GradientSink
from mplug.model.build import build_model
from mplug.model.model import Model
from mplug.training.assembly import build
from mplug_sharding import GatheredPlacement
from mplug_testing import ParallelSuite, run_workers
from mplug_testing.harness import Trace, difference, tiny_run, train_steps
from mplug_testing.parity import require_parity, trained_once

KEPT = {"parallel.fsdp.reshard_after_forward": False}
UNEVEN = {"model.vocab_size": 257, "data.vocab_size": 257, "model.hidden_size": 24, "model.ffn_hidden_size": 50}


@pytest.mark.wide(
    "layouts", tests=["test_a_variant_gives_the_run_of_one_process"], quick=["weights-kept-after-forward", "offloaded"]
)
class TestFullyShardedDataParallel(ParallelSuite):
    plugin = "fsdp"
    layouts = ("fsdp2", "dp2fsdp2")
    variants = {
        "everything": {**ParallelSuite.variants["another-model"], **ParallelSuite.variants["dropout"]},
        "weights-kept-after-forward": {**KEPT, "parallel.fsdp.prefetch": 2},
        "offloaded": {"parallel.fsdp.cpu_offload": True, "parallel.fsdp.prefetch": 0},
    }
    refused = {"fsdp8": ("trainer.global_batch_size", "8", "2", "8 data-parallel ranks", "a multiple of 16")}
    examples = {"gather": ["copies"], "reduce_dtype": ["bf16"]}  # copies are refused without FP8


SMALL = {"model.num_layers": 1, "model.vocab_size": 260}


@pytest.mark.wide("layouts")
def test_another_model_gives_the_run_of_one_process() -> None:
    require_parity({**UNEVEN, "model.tie_embeddings": True}, "fsdp4")


def by_another_method() -> None:
    """Units run by a method of another name, and 'forward' is nobody's business."""
    place = Model.place

    def placed(self: Model, mesh: Any, stages: Any) -> None:
        place(self, mesh, stages)
        self.plan = replace(self.plan, units=tuple(replace(unit, method="again") for unit in self.plan.units))
        for unit in self.plan.units:
            kind: Any = type(self.module.get_submodule(unit.name))
            kind.again = kind.forward

    Model.place = placed  # type: ignore[method-assign]


def test_weights_are_gathered_whatever_the_method_is_that_runs_a_unit() -> None:
    assert difference_of("fsdp2", SMALL, by_another_method) == ""


def test_it_may_take_the_ranks_that_a_layout_leaves() -> None:
    for layout, whole, ranks in (("ep2tp2", "ep2tp2", 2), ("ep4tp2", "ep4tp2fsdp2", 4)):
        run = tiny_run({**EXPERTS, "parallel.layout": layout, "parallel.data": "fsdp"})
        assert (run.config.parallel.layout, run.mesh.world_size) == (whole, ranks)


# What is where.


def look(settings: dict[str, Any]) -> dict[str, Any]:
    """Be one rank, for a step of two micro batches: how its parameters are held, and what is left of a unit's."""
    parts = build(tiny_run(settings))
    up: Any = parts.model.module.get_submodule("blocks.1.mlp.up")
    arena, in_sinks, sum_all = parts.model.sinks.arena.untyped_storage().data_ptr(), list[bool](), gathered.sum_each

    def sum_each(totals: list[Tensor], tensors: list[Tensor], group: Any) -> None:
        in_sinks.extend(total.untyped_storage().data_ptr() == arena for total in totals)
        sum_all(totals, tensors, group)

    rounded, copy_each = list[int](), torch._foreach_copy_

    def round_each(targets: list[Tensor], sources: list[Tensor]) -> None:
        rounded.append(sum(one.numel() for one in sources))
        copy_each(targets, sources)

    gathered.sum_each, torch._foreach_copy_ = sum_each, round_each  # type: ignore[attr-defined]
    shape = parts.model.placements["blocks.1.mlp.up.weight"].shape
    gemm, seen, whole = up.gemm, list[tuple[bool, torch.dtype]](), list[Tensor]()

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((weight.shape == shape, weight.dtype))
        whole.append(weight)
        return gemm.forward(x, weight)

    up.gemm = replace(gemm, forward=forward)
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    return {
        "in the unit": seen,
        "bytes of it afterwards": [weight.untyped_storage().nbytes() for weight in whole],
        "bytes of its gradient": [weight.main_grad.untyped_storage().nbytes() for weight in whole],
        "at rest": tuple(up.weight.shape) == (shape[0] // 2, *shape[1:]),
        "rounded": (sum(rounded), sum(one.master.numel() for one in parts.pieces if one.name.startswith("head."))),
        "summed into sinks": (in_sinks[: len(in_sinks) // 2], in_sinks[len(in_sinks) // 2 :]),
        "masters": {piece.master.dtype for piece in parts.pieces},
        "copies": [piece.name for piece in parts.pieces if piece.weight is not None],
        "gradients": {piece.gradient.dtype for piece in parts.pieces},
        "elements": sum(piece.master.numel() for piece in parts.pieces),
        "norm": float(parts.stepper.update(1e-3, 0.0).grad_norm),
    }


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
@pytest.mark.wide("precision", quick=["bf16"])
def test_masters_are_divided_in_fp32_and_units_compute_in_bf16(reduce_dtype: str) -> None:
    settings = {"trainer.precision": "bf16", "parallel.fsdp.reduce_dtype": reduce_dtype}
    found = run_workers(2, look, {**settings, "parallel.layout": "fsdp2"})
    whole = sum(placement.numel for placement in build_model(tiny_run({})).placements.values())
    assert sum(one["elements"] for one in found) == whole
    for rank, one in enumerate(found):
        assert one["in the unit"] == [(True, torch.bfloat16)] * 2, "in two micro batches, each time whole"
        assert (one["masters"], one["gradients"], one["copies"]) == ({torch.float32}, {torch.float32}, [])
        assert one["bytes of it afterwards"] == one["bytes of its gradient"] == [0, 0]
        assert one["at rest"], "a reader of parameters finds the rows"
        (rounded, head), (first, second) = one["rounded"], one["summed into sinks"]
        assert rank or rounded == 3 * one["elements"] - head, (
            "once for a step's first pass; the head stays for backward"
        )
        copied = 2 * rank if reduce_dtype == "fp32" else len(first)  # of two tables of 259 rows, rank 1 has fewer
        assert (first.count(False), any(second)) == (copied, False), "a step's first sums need no copy"
    exact = run_workers(1, norm_of_one_process, {})[0]
    assert [one["norm"] for one in found] == pytest.approx([exact] * 2, rel=0.02)


def formats_of_gradients(runs: list[dict[str, Any]]) -> list[dict[str, torch.dtype]]:
    """For each run, the format in which the products of units add to the gradient of each parameter."""
    found: list[dict[str, torch.dtype]] = []
    original = units.Gathered

    def recorded(rows: list[Any], group: Any, lane: Any, formats: Any, *rest: Any) -> Any:
        found[-1].update(dict.fromkeys((one.name for one in rows), formats.gradients))
        return original(rows, group, lane, formats, *rest)

    units.Gathered = recorded  # type: ignore[assignment, misc]
    for settings in runs:
        found.append({})
        build(tiny_run(settings))
    return found


def test_gradients_to_which_several_units_add_are_in_the_masters_precision() -> None:
    own = {"trainer.precision": "bf16", "parallel.layout": "fsdp2"}
    tied = {**own, "model.tie_embeddings": True}
    for alone, shared in run_workers(2, formats_of_gradients, [own, tied]):
        assert alone["head.project.weight"] == torch.bfloat16, "the last unit's, by one product"
        assert alone["embedding.token.weight"] == torch.float32
        (name,) = {"head.project.weight", "embedding.token.weight"} & shared.keys()
        assert shared[name] == torch.float32


def norm_of_one_process(settings: dict[str, Any]) -> float:
    parts = build(tiny_run(settings))
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    return float(parts.stepper.update(1e-3, 0.0).grad_norm)


# Planted mistakes.


def averaged() -> None:
    """Gradients are divided by the number of ranks, as other implementations do."""
    original = gathered.sum_each

    def averaging(totals: list[Tensor], tensors: list[Tensor], group: Any) -> None:
        for tensor in tensors:
            tensor.div_(group.size())
        original(totals, tensors, group)

    gathered.sum_each = averaging  # type: ignore[attr-defined]


def overwritten() -> None:
    """A micro batch's gradient replaces that of the one before it."""
    original = GradientSink.contribute

    def contribute(self: GradientSink, gradient: Tensor) -> None:
        self.stale.fill_(True)
        original(self, gradient)

    GradientSink.contribute = contribute  # type: ignore[method-assign]


def summed_again() -> None:
    """The host sums gradients over the axis too, although the reduce-scatter has summed them."""
    os.environ[ops.CHECK] = "0"  # it finds this before the comparison does
    original = GatheredPlacement.of

    def of(*arguments: Any) -> GatheredPlacement:
        return replace(original(*arguments), apart=(), summed=())

    GatheredPlacement.of = of  # type: ignore[method-assign, assignment]


def unsummed_beside() -> None:
    """Replicas keep their own sums of the rows' gradients."""
    mplug_dp.buckets.Queue._hear = mplug_dp.buckets.Queue.wait = lambda *_: None  # type: ignore[assignment, method-assign]


MISTAKES = [("fsdp2", averaged), ("fsdp2", overwritten), ("fsdp2", summed_again), ("dp2fsdp2", unsummed_beside)]


@pytest.mark.parametrize(("layout", "mistake"), MISTAKES, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.wide("suites", quick=["dp2fsdp2-unsummed_beside"])
def test_the_comparison_catches(layout: str, mistake: Any) -> None:
    assert difference_of(layout, SMALL, mistake)


# Compiled.


def compiled(settings: dict[str, Any]) -> tuple[Trace, int, int]:
    """Be one rank: what it saw, and how many graphs torch has made, and broken."""
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")  # torch's own, as it traces
    return train_steps(settings), counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.wide("compile")
def test_weights_are_gathered_around_compiled_units_of_one_graph_each() -> None:
    settings = {**SMALL, "parallel.layout": "fsdp2", "trainer.compile": "aot_eager"}
    found = run_workers(2, compiled, settings)
    assert difference([trace for trace, _, _ in found], trained_once(SMALL)[0]) == ""
    assert [(graphs, breaks) for _, graphs, breaks in found] == [(6, 0)] * 2


# What does not fit.

OFFLOAD = "parallel.fsdp.cpu_offload=true"
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    (
        f"dp2fsdp2 {OFFLOAD}",
        {},
        ("parallel.fsdp.cpu_offload", "the axis 'dp' cannot sum them", "give its ranks to fsdp"),
    ),
    (f"ep2fsdp2 {OFFLOAD}", EXPERTS, ("parallel.fsdp.cpu_offload", "'blocks.0.", "does not shard")),
    ("fsdp2zero2", {}, ("parallel/fsdp and parallel/zero both shard", "use a layout with only one of them")),
]


@pytest.mark.parametrize(("layout", "settings", "words"), REFUSED)
def test_what_does_not_fit_is_refused_before_launch(
    layout: str, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert_refused(layout, settings, *words)


def test_a_schedule_that_splits_backward_is_refused_before_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Model.place
    monkeypatch.setattr(Model, "place", lambda self, mesh, stages: place(self, mesh, replace(stages, backward="split")))
    assert_refused("fsdp2pp2", {}, "computes weight gradients later; use a schedule", "1f1b")
