"""Context parallelism passes the suite of strategies, by a ring; each other method has one layout."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from mplug import UsageError
from mplug.model.build import build_model, unmet_reasons
from mplug_testing import ParallelSuite, run_workers
from mplug_testing.harness import Trace, difference, tiny_run, train_steps

DOCUMENTS = {"data.documents": 5}
ULYSSES = {"parallel.cp.method": "ulysses"}
ALL_GATHER = {"parallel.cp.method": "all_gather"}
HIERARCHICAL = {"parallel.cp.method": "hierarchical", "parallel.cp.ulysses_degree": 2}
EVERYTHING = ParallelSuite.variants["another-model"]
DROPOUT = ParallelSuite.variants["dropout"]


class TestContextParallel(ParallelSuite):
    plugin = "cp"
    layouts = ("cp2", "cp4")
    variants = {
        "documents": {**DOCUMENTS, "model.num_kv_heads": 1},
        "another-model": {**EVERYTHING, **DOCUMENTS, "model.dropout": 0.1},
        "all-gather": {**ALL_GATHER, **DOCUMENTS},
        "ulysses": {**ULYSSES, **DOCUMENTS, **DROPOUT, "model.num_kv_heads": 1, "model.position": "alibi"},
    }
    refused = {
        "cp3": ("cp=3", "16", "6 chunks"),
        "cp16": ("cp=16", "32 chunks", "16"),
    }
    beside = {"ulysses_degree": {**HIERARCHICAL, "parallel.layout": "cp4"}}

    @pytest.mark.wide("suites")
    def test_every_field_of_its_config_has_an_effect(self) -> None:
        super().test_every_field_of_its_config_has_an_effect()


Settings = dict[str, Any]

CHOSEN: list[tuple[str, Settings]] = [
    ("cp4", {**HIERARCHICAL, **DOCUMENTS}),
    ("cp2tp2", {**ALL_GATHER, **DOCUMENTS}),
    ("cp2pp2", {**ULYSSES, **DOCUMENTS}),
]


def told(choice: tuple[str, Settings]) -> str:
    return " ".join([choice[0], *(str(value) for value in choice[1].values())])


_REFERENCES: dict[str, Trace] = {}


def alone(changes: Settings) -> Trace:
    """The same run in one process, eager: trained once."""
    own = {name: value for name, value in changes.items() if not name.startswith(("parallel.", "trainer.compile"))}
    if str(own) not in _REFERENCES:
        _REFERENCES[str(own)] = run_workers(1, trained, own)[0]
    return _REFERENCES[str(own)]


def trained(settings: Settings, mutation: str | None = None) -> Trace:
    """Be one rank of a run, with a planted mistake."""
    warnings.simplefilter("ignore")  # torch's own, as it traces
    return train_steps(settings, {**MUTATIONS, LARGE: large}[mutation] if mutation else None)


def ranks(layout: str, changes: Settings, mutation: str | None = None) -> list[Trace]:
    settings = {**changes, "parallel.layout": layout}
    return run_workers(tiny_run(settings).mesh.world_size, trained, settings, mutation)


@pytest.mark.parametrize("choice", CHOSEN, ids=told)
def test_every_method_gives_the_run_of_one_process(choice: tuple[str, Settings]) -> None:
    layout, changes = choice
    assert difference(ranks(layout, changes), alone(changes)) == ""


@pytest.mark.wide("compile")
def test_units_are_one_graph_each_in_which_the_ring_is_one_operator() -> None:
    changes = {**DOCUMENTS, "trainer.compile": "aot_eager"}
    found, graphs = zip(*run_workers(2, compiled, {**changes, "parallel.layout": "cp2"}), strict=True)
    assert difference(list(found), alone(changes)) == ""
    assert graphs == ((6, 0), (6, 0)), "three kinds of units, for training and for evaluation, without a break"


def compiled(settings: Settings) -> tuple[Trace, tuple[int, int]]:
    from torch._dynamo.utils import counters

    trace = trained(settings)
    return trace, (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


# Planted mistakes.


def leaking() -> None:
    """A document has the first token of the next one, too, where that is the first of a rank's chunk."""
    import mplug_cp.documents
    from torch import Tensor

    original = mplug_cp.documents._clipped

    def clipped(lengths: Tensor, ranges: tuple[range, ...]) -> Tensor:
        found = original(lengths, ranges)
        ends = lengths.cumsum(dim=1)
        for part in ranges:
            ended = (ends == part.start) & (ends > 0)  # [B, M]
            found = found + ended.int() - ended.roll(1, dims=1).int()
        return found

    mplug_cp.documents._clipped = clipped


def straight() -> None:
    """Positions are cut into contiguous parts, and everything else in zigzag."""
    import mplug.training.batch_parts
    from mplug import contiguous

    original = mplug.training.batch_parts.own_entries

    def own_entries(batch: Any, context: Any, mesh: Any, rank: int) -> Any:
        own = dict(original(batch, context, mesh, rank))
        (part,) = contiguous(batch["positions"].shape[1], mesh.axes["cp"].size, mesh.index(rank, "cp"))
        own["positions"] = batch["positions"][:, part.start : part.stop]
        return own

    mplug.training.batch_parts.own_entries = own_entries


def unsummed() -> None:
    """The norms' gradients are not summed over context-parallel ranks."""
    from dataclasses import replace

    from mplug.layout.plan import Plan

    original = Plan.match

    def match(self: Plan, names: Any) -> Any:
        return {
            name: replace(one, over=("batch",)) if "norm" in name else one
            for name, one in original(self, names).items()
        }

    Plan.match = match  # type: ignore[method-assign]


MUTATIONS: dict[str, Callable[[], None]] = {
    "a document mask leaks by one token at a border of ranks": leaking,
    "positions are not permuted with the zigzag": straight,
    "the gradients of norms are not summed": unsummed,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_catches(mutation: str) -> None:
    changes = {"data.documents": 8}  # of two tokens in the mean: in many samples one ends where a chunk does
    assert difference(ranks("cp2", changes, mutation), alone(changes)) != ""


LARGE = "every gradient is large"


def large() -> None:
    import mplug.gradients.reduction

    mplug.gradients.reduction.IN_PLACE = 1


def test_large_gradients_which_the_host_sums_in_place_are_those_of_one_process() -> None:
    assert difference(ranks("cp2tp2", DOCUMENTS, LARGE), alone(DOCUMENTS)) == ""


# Refusals.


def refusal(**changes: Any) -> str:
    settings = {name.replace("__", "."): value for name, value in changes.items()}
    with pytest.raises(UsageError) as refused:
        build_model(tiny_run({"parallel.layout": "cp4", **settings}))
    return str(refused.value)


@pytest.mark.parametrize("method", ["ring", "all_gather", "hierarchical"])
def test_attention_dropout_is_refused_where_attention_is_computed_in_parts(method: str) -> None:
    degree = {"parallel__cp__ulysses_degree": 2} if method == "hierarchical" else {}
    said = refusal(parallel__cp__method=method, model__attention_dropout=0.1, **degree)
    assert (
        "parallel/cp cannot serve Attention.core of 'blocks.*.attn': attention that is computed by parts does not"
        in said
    )
    assert "attention dropout is 0.1; set it to 0, or set parallel.cp.method=ulysses" in said
    assert "parallel.cp.method=ulysses" in said


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_what_parts_of_attention_cannot_say_is_refused(method: str) -> None:
    said = refusal(parallel__cp__method=method, model__position="alibi")
    assert (
        "parallel/cp cannot serve Attention.core of 'blocks.*.attn': attention that is computed by parts does not"
        in said
    )
    assert "does not support alibi bias" in said
    assert "parallel.cp.method=ulysses" in said


def test_heads_that_do_not_divide_are_refused_with_what_would_do() -> None:
    said = refusal(parallel__layout="cp4tp2", parallel__cp__method="ulysses")
    assert "cp=4 does not divide the 2 query heads of a rank; use 1 or 2, or set parallel.cp.method=ring" in said
    settings = {"parallel__cp__method": "hierarchical", "parallel__cp__ulysses_degree": 4}
    assert "parallel.cp.ulysses_degree=4 does not divide the 2" in refusal(parallel__layout="cp4tp2", **settings)


def test_groups_of_neighbours_belong_to_the_hierarchy() -> None:
    assert "'hierarchical' requires a degree" in refusal(parallel__cp__method="hierarchical")
    assert "every other method refuses it; remove it" in refusal(parallel__cp__ulysses_degree=2)
    degree = {"parallel__cp__method": "hierarchical", "parallel__cp__ulysses_degree": 3}
    assert "parallel.cp.ulysses_degree=3 does not divide cp=4" in refusal(**degree)


def test_a_kernel_that_gives_no_log_sum_exp_is_refused_where_a_method_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import mplug_sdpa.limits

    monkeypatch.setitem(mplug_sdpa.limits.OFFERED, "math", set())
    kernels = {"kernels.attention": "sdpa", "kernels.sdpa.backend": "math"}
    said = unmet_reasons(tiny_run({"parallel.layout": "cp4", **kernels}))
    assert said[0] == "kernels/sdpa cannot serve Attention.core of 'blocks.*.attn': it does not offer log-sum-exp"
    assert unmet_reasons(tiny_run({"parallel.layout": "cp4", **kernels, **ULYSSES})) == []


def test_explain_says_by_which_method() -> None:
    wraps = {
        wrap.label
        for filled in build_model(tiny_run({"parallel.layout": "cp4", **HIERARCHICAL})).slots
        for wrap in filled.wraps
    }
    assert wraps == {"parallel/cp (ring)", "parallel/cp (exchange of heads)"}
