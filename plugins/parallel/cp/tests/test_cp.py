"""Context parallelism passes the suite of strategies, by a ring; each other method has one layout."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from layout_runs import assert_refused, difference_of
from layout_words import COMPILING
from mplug_cp.wraps import _around_joins
from torch import Tensor

from mplug import contiguous
from mplug.layout.plan import Plan
from mplug.model.build import build_model, unmet_reasons
from mplug.training import batch_parts
from mplug.training.assembly import build
from mplug_testing import ParallelSuite, run_workers
from mplug_testing.harness import Trace, difference, tiny_run, train_steps
from mplug_testing.parity import require_parity, trained_once

DOCUMENTS = {"data.documents": 5}
ULYSSES = {"parallel.cp.method": "ulysses"}
ALL_GATHER = {"parallel.cp.method": "all_gather"}
HIERARCHICAL = {"parallel.cp.method": "hierarchical", "parallel.cp.ulysses_degree": 2}
BY_DOCUMENTS = {**ALL_GATHER, "parallel.cp.divide": "documents", "parallel.cp.equal_length": 16}
CHUNKS = {**ULYSSES, "parallel.cp.head_chunks": 2, "model.num_kv_heads": 4}
EVERYTHING, DROPOUT = ParallelSuite.variants["another-model"], ParallelSuite.variants["dropout"]


@pytest.mark.wide("layouts", tests=["test_a_variant_gives_the_run_of_one_process"], quick=["ulysses"])
@pytest.mark.wide("layouts", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestContextParallel(ParallelSuite):
    plugin = "cp"
    layouts = ("cp2", "cp4")
    variants = {
        "documents": {**DOCUMENTS, "model.num_kv_heads": 1},
        "another-model": {**EVERYTHING, **DOCUMENTS, "model.dropout": 0.1},
        "all-gather": {**ALL_GATHER, **DOCUMENTS},
        "by-documents": {**BY_DOCUMENTS, **DOCUMENTS},
        "ulysses": {**ULYSSES, **DOCUMENTS, **DROPOUT, "model.num_kv_heads": 1, "model.position": "alibi"},
    }
    refused = {"cp3": ("cp=3", "16", "6 chunks"), "cp16": ("cp=16", "32 chunks", "16")}
    beside = {"ulysses_degree": {**HIERARCHICAL, "parallel.layout": "cp4"}}


METHODS = {"cp4": HIERARCHICAL, "cp2tp2": ALL_GATHER, "cp2pp2": ULYSSES}


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.wide("layouts")) if one == "cp4" else one for one in METHODS]
)
def test_every_method_gives_the_run_of_one_process(layout: str) -> None:
    require_parity({**METHODS[layout], **DOCUMENTS}, layout)


PACKED_UNDER = [
    *(
        (layout, method)
        for layout in ("cp2", "cp4", "cp2pp2", "cp2tp2")
        for method in ("ring", "all_gather", "ulysses", "documents")
    ),
    ("cp4", "hierarchical"),
    ("cp4tp2", "hierarchical"),
    ("cp2", "chunks"),
    ("cp2pp2", "chunks"),
]


@pytest.mark.wide("layouts", quick=["never-9-cp2-documents"])
@COMPILING
@pytest.mark.parametrize(("layout", "method"), PACKED_UNDER)
@pytest.mark.parametrize("documents", [1, 2, 3, 9, 40])
@pytest.mark.parametrize("compiled", ["never", "aot_eager"])
def test_documents_of_one_token_to_the_whole_sequence_give_the_run_of_one_process(
    compiled: str, documents: int, layout: str, method: str
) -> None:
    """The set `pairs` has documents that stay whole beside all other features."""
    settings = {"hierarchical": HIERARCHICAL, "documents": BY_DOCUMENTS, "chunks": CHUNKS}.get(
        method, {"parallel.cp.method": method}
    )
    if method == "documents" and documents == 1:
        return assert_refused(layout, settings, "divides packed samples, and these have no document lengths")
    packed = {"data.documents": documents, "trainer.seq_length": 48, "trainer.compile": compiled}
    return require_parity({**settings, **packed}, layout)


def summed_beside_backward(settings: dict[str, Any]) -> set[str]:
    return set(build(tiny_run(settings)).model.sinks.reduced_over)


def test_the_gradients_over_cp_are_summed_while_backward_runs() -> None:
    """By dp with one rank, which sums buckets over all axes over which gradients are partial; else by the host."""
    by_dp, by_host = ({"parallel.layout": "cp2", "data.name": "mock", "parallel.data": data} for data in ("dp", None))
    assert run_workers(2, summed_beside_backward, by_dp) == [{"cp", "dp"}] * 2
    assert run_workers(2, summed_beside_backward, by_host) == [set()] * 2


def joined(settings: dict[str, Any]) -> tuple[list[float], float]:
    """Be one rank with a row of its number: the rows that it joins, and its row's gradient, weighted by ranks."""
    run = tiny_run(settings)
    (gather, _), rank = _around_joins(run), torch.tensor([[float(dist.get_rank())]], requires_grad=True)
    rows = gather.wrap(lambda row: 10 * row)(rank)
    (rows * (1 + rank.detach())).sum().backward()
    return rows[0].tolist(), float(rank.grad)


def test_the_rows_of_a_stream_are_gathered_from_the_ranks_that_share_its_segments_and_their_gradients_summed() -> None:
    found = run_workers(4, joined, {"parallel.layout": "dp2cp2"})
    assert sorted(found) == [([0.0, 10.0], 30.0)] * 2 + [([20.0, 30.0], 70.0)] * 2


def compiled(settings: dict[str, Any]) -> tuple[Trace, tuple[int, int]]:
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")  # torch's own, as it traces
    trace = train_steps(settings)
    return trace, (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


@pytest.mark.wide("compile")
@pytest.mark.parametrize("method", [{}, BY_DOCUMENTS, CHUNKS], ids=["ring", "documents", "chunks"])
def test_units_are_one_graph_each_in_which_the_method_is_one_operator(method: dict[str, Any]) -> None:
    settings = {**DOCUMENTS, **method, "trainer.compile": "aot_eager", "parallel.layout": "cp2"}
    found, graphs = zip(*run_workers(2, compiled, settings), strict=True)
    alone = {name: value for name, value in {**DOCUMENTS, **method}.items() if not name.startswith("parallel.")}
    assert difference(list(found), trained_once(alone)[0]) == ""
    assert graphs == ((6, 0), (6, 0)), "three kinds of units, for training and for evaluation, without a break"


# Planted mistakes.


def leaking() -> None:
    """A document has the first token of the next one, too, where that is the first of a rank's chunk."""
    import mplug_cp.documents

    original = mplug_cp.documents.clipped

    def clipped(lengths: Tensor, ranges: tuple[range, ...]) -> Tensor:
        found = original(lengths, ranges)
        ends = lengths.cumsum(dim=1)
        for part in ranges:
            ended = (ends == part.start) & (ends > 0)  # [B, M]
            found = found + ended.int() - ended.roll(1, dims=1).int()
        return found

    mplug_cp.documents.clipped = clipped


def straight() -> None:
    """Positions are cut into contiguous parts, and everything else in zigzag."""
    original = batch_parts.own_entries

    def own_entries(batch: Any, context: Any, mesh: Any, rank: int) -> Any:
        own = dict(original(batch, context, mesh, rank))
        (part,) = contiguous(batch["positions"].shape[1], mesh.axes["cp"].size, mesh.index(rank, "cp"))
        return {**own, "positions": batch["positions"][:, part.start : part.stop]}

    batch_parts.own_entries = own_entries


def unsummed() -> None:
    original = Plan.match

    def match(self: Plan, names: Any) -> Any:
        found = original(self, names)
        return {name: replace(one, over=("batch",)) if "norm" in name else one for name, one in found.items()}

    Plan.match = match  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", [leaking, straight, unsummed])
@pytest.mark.wide("suites", quick=["unsummed"])
def test_the_comparison_catches(mistake: Any) -> None:
    documents = {"data.documents": 8}  # of two tokens in the mean: in many samples one ends where a chunk does
    assert difference_of("cp2", documents, mistake) != ""


def large() -> None:
    import mplug_steps.reduction

    mplug_steps.reduction.IN_PLACE = 1


@pytest.mark.wide("layouts")
def test_large_gradients_which_the_host_sums_in_place_are_those_of_one_process() -> None:
    assert difference_of("cp2tp2", DOCUMENTS, large) == ""


# Refusals.

CANNOT = "parallel/cp cannot serve Attention.core of 'blocks.*.attn': attention that is computed by parts does not"
IN_GROUPS = "parallel.cp.method=hierarchical parallel.cp.ulysses_degree="
REFUSED: list[tuple[str, ...]] = [
    *(
        (
            f"cp4 parallel.cp.method={method} model.attention_dropout=0.1",
            *(CANNOT, "attention dropout is 0.1; set it to 0, or set parallel.cp.method=ulysses"),
        )
        for method in ("ring", "all_gather", "hierarchical parallel.cp.ulysses_degree=2")
    ),
    *(
        (f"cp4 parallel.cp.method={method} model.position=alibi", CANNOT, "alibi bias", "parallel.cp.method=ulysses")
        for method in ("ring", "all_gather")
    ),
    (
        "cp4tp2 parallel.cp.method=ulysses",
        "cp=4 does not divide the 2 query heads of a rank; use 1 or 2, or set parallel.cp.method=hierarchical and "
        "parallel.cp.ulysses_degree=2, or parallel.cp.method=ring",
    ),
    (f"cp4tp2 {IN_GROUPS}4", "parallel.cp.ulysses_degree=4 does not divide the 2"),
    ("cp4 parallel.cp.method=hierarchical", "'hierarchical' requires a degree"),
    ("cp4 parallel.cp.ulysses_degree=2", "every other method refuses it; remove it"),
    (f"cp4 {IN_GROUPS}3", "parallel.cp.ulysses_degree=3 does not divide cp=4"),
    ("cp4 parallel.cp.head_chunks=2", "parallel.cp.head_chunks=2 is for parallel.cp.method=ulysses, not ring"),
    ("cp4 parallel.cp.divide=documents", "parallel.cp.divide=documents exchanges", "method=all_gather, not ring"),
    (
        "cp4 parallel.cp.method=all_gather parallel.cp.divide=documents",
        "parallel.cp.divide=documents divides packed samples, and these have no document lengths; remove it",
    ),
]


@pytest.mark.parametrize(("layout", "words"), [(layout, words) for layout, *words in REFUSED])
def test_what_a_method_cannot_compute_is_refused_with_what_would_do(layout: str, words: list[str]) -> None:
    assert_refused(layout, {}, *words)


EXPERTS = {**tiny_models.EXPERTS, **BY_DOCUMENTS, **DOCUMENTS, "model.z_loss_coefficient": 0.001}
BALANCED: dict[str, dict[str, Any]] = {
    "sequence": {"model.moe_balance": "sequence", "model.aux_loss_coefficient": 0.05},
    "micro batch": {"model.moe_balance": "micro_batch", "model.aux_loss_coefficient": 0.05},
    "global batch": {"model.moe_balance": "global_batch", "model.aux_loss_coefficient": 0.05},
    "bias": {"model.expert_bias_rate": 0.01},
    "sinkhorn": {"model.moe_router_score": "sinkhorn"},
    "room for high gates": {"model.capacity_factor": 1.0},
    "room for first tokens": {"model.capacity_factor": 1.0, "model.capacity_dropping": "position"},
}


@pytest.mark.wide("layouts", quick=["cp2ep2-sequence", "cp2tp2-room for first tokens"])
@pytest.mark.parametrize("balance", BALANCED)
@pytest.mark.parametrize("layout", ["cp2", "cp2tp2", "cp2pp2", "cp2ep2"])
def test_experts_are_balanced_over_documents_that_stay_whole(layout: str, balance: str) -> None:
    require_parity({**EXPERTS, **BALANCED[balance]}, layout)


def test_a_kernel_that_gives_no_log_sum_exp_is_refused_where_a_method_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import mplug_sdpa.limits

    monkeypatch.setitem(mplug_sdpa.limits.OFFERED, "math", set())
    settings = {"parallel.layout": "cp4", "kernels.attention": "sdpa", "kernels.sdpa.backend": "math"}
    said = unmet_reasons(tiny_run(settings))
    assert said[0] == "kernels/sdpa cannot serve Attention.core of 'blocks.*.attn': it does not offer log-sum-exp"
    assert unmet_reasons(tiny_run({**settings, **ULYSSES})) == []


def test_explain_says_by_which_method() -> None:
    slots = build_model(tiny_run({"parallel.layout": "cp4", **HIERARCHICAL})).slots
    wraps = {wrap.label for filled in slots for wrap in filled.wraps}
    assert wraps == {"parallel/cp (ring)", "parallel/cp (exchange of heads)"}
