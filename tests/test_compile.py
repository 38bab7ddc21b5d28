"""Units compiled as one graph each: the numbers of an eager run under every layout, and nothing compiled twice."""

import warnings

import pytest

from mplug.testing import run_workers
from mplug.testing.harness import Trace, difference, train_steps

Counts = dict[str, int]


def compiled(settings: dict[str, object]) -> tuple[Trace, Counts]:
    """Be one rank of a run; returns what it saw, and what torch counted while it compiled."""
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")  # torch's own, as it traces
    trace = train_steps(settings)
    return trace, {**counters["stats"], "graph breaks": sum(counters["graph_break"].values())}


@pytest.fixture(scope="module")
def eager() -> Trace:
    """The run of one process, eager."""
    return run_workers(1, train_steps, {"model.dropout": 0.1})[0]


@pytest.mark.parametrize(("layout", "world_size", "graphs"), [("", 1, 6), ("tp2", 2, 6), ("pp2", 2, 4), ("dp2", 2, 6)])
def test_a_compiled_run_is_the_eager_run_of_one_process(
    eager: Trace, layout: str, world_size: int, graphs: int
) -> None:
    """Three kinds of units (a stage of two has two), each traced for training and for evaluation, and never again."""
    settings = {"model.dropout": 0.1, "parallel.layout": layout, "trainer.compile": "aot_eager"}
    found = run_workers(world_size, compiled, settings, timeout=180)
    assert difference([trace for trace, _ in found], eager) == ""
    for _, counts in found:
        assert counts["unique_graphs"] == graphs
        assert counts["graph breaks"] == 0


def test_blocks_of_one_kind_share_what_is_compiled() -> None:
    settings = {"model.num_layers": 8, "trainer.compile": "aot_eager"}
    assert run_workers(1, compiled, settings, timeout=180)[0][1]["unique_graphs"] == 6
