"""Which ranks are named, by which kind of work, in real runs with a slow rank."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_stragglers.clock import WorkClock
from mplug_stragglers.scores import lowest, scores, sentences

from mplug import hookimpl
from mplug.registry.hooks import HOST
from mplug.run.prepare import prepare
from mplug.training.feed import Feed
from mplug.training.loop import train
from mplug_testing import ExtensionSuite
from mplug_testing.harness import as_rank, tiny_config
from mplug_testing.waiting import never_waiting
from mplug_testing.workers import run_workers

USUAL = {"compute": 1.0, "data": 0.01, "host": 0.02, "communication": 0.5, "step": 4.0}


class TestStragglers(ExtensionSuite):
    plugin = "stragglers"
    settings = {"extensions.stragglers.every": 2}


def test_a_score_is_the_median_over_the_own_time_and_small_differences_do_not_count() -> None:
    times = [USUAL, {**USUAL, "compute": 2.0}, {**USUAL, "host": 0.2}, USUAL]
    by_rank = scores(times)
    assert by_rank[1] == {"compute": 0.5, "data": 1.0, "host": 1.0}
    assert by_rank[2]["host"] == 1.0  # 0.18 s of a step of 4 s
    assert lowest(by_rank) == (1, 0.5)
    (sentence,) = sentences(by_rank, times, ["a", "b", "b", "a"], 0.75)
    assert sentence == (
        "rank 1 on b is a straggler: it computes for 2 s of a step of 4 s, and the median of all ranks is 1 s (score "
        "0.50); the other ranks wait 0.5 s in collectives of forward passes"
    )
    times = [{**one, "communication": 0.0} for one in times]
    assert sentences(by_rank, times, ["a", "b", "b", "a"], 0.75)[0].endswith("(score 0.50)")


def test_the_kind_of_work_that_costs_most_is_named() -> None:
    times = [USUAL, USUAL, {**USUAL, "data": 3.0, "host": 0.5}, USUAL]
    (sentence,) = sentences(scores(times), times, ["a"] * 4, 0.75)
    assert "rank 2 on a is a straggler: it waits for data for 3 s" in sentence


class Slow:
    """Makes a rank slow in a kind of work, by 30 ms a step."""

    def __init__(self, rank: int, kind: str) -> None:
        self.rank, self.kind = rank, kind
        self.scores: list[float] = []

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> None:
        if run.rank == self.rank and self.kind == "compute":
            for unit in model.own_units[1:2]:
                part = model.module.get_submodule(unit.name)
                setattr(part, unit.method, partial(_slowed, getattr(part, unit.method)))

    @hookimpl
    def micro_batch_began(self, run: Any) -> None:
        if run.rank == self.rank and self.kind == "host":
            time.sleep(0.03)

    @hookimpl
    def step_finished(self, record: Any) -> None:
        self.scores += [record["straggler_score"]] if "straggler_score" in record else []


def _slowed(run: Any, *inputs: Any, **optional: Any) -> Any:
    time.sleep(0.03)
    return run(*inputs, **optional)


def slow_run(settings: Mapping[str, Any], slow: Slow, directory: str) -> tuple[str, list[float]]:
    """The log of rank 0, and the scores."""
    own = {"extensions.stragglers.every": 1, "trainer.steps": 6, "checkpoint.every": 0}
    config = tiny_config({**own, **settings})
    run = as_rank(prepare(config, {f"{HOST}a slow rank": slow}, Path(directory)))
    run.device = "cpu"
    if slow.kind == "data" and run.rank == slow.rank:
        take = Feed._batches

        def late(self: Feed, batches: Any, num_samples: int) -> Any:
            found = take(self, batches, num_samples)
            found._batches = (time.sleep(0.03) or one for one in found._batches)
            return found

        Feed._batches = late  # type: ignore[method-assign]  # in this process only
    train(run)
    return (Path(directory) / "logs" / "rank0.log").read_text(), slow.scores


@pytest.mark.wide("layouts", quick=["dp4-data-it waits for data for", "fsdp4-compute-it computes for"])
@pytest.mark.parametrize(
    ("layout", "kind", "words"),
    [
        pytest.param("dp4", "compute", "it computes for", marks=pytest.mark.wide("layouts")),
        ("tp2dp2", "compute", "it computes for"),
        ("fsdp4", "compute", "it computes for"),  # the others wait for it when they gather weights
        ("dp4", "data", "it waits for data for"),
        ("dp2tp2", "host", "it runs Python for"),
    ],
)
def test_a_slow_rank_is_named_with_its_kind_of_work(layout: str, kind: str, words: str, tmp_path: Path) -> None:
    found = run_workers(4, slow_run, {"parallel.layout": layout}, Slow(2, kind), str(tmp_path))
    log, measured = found[0]
    assert f"rank 2 on {gethostname()} is a straggler: {words}" in log
    assert min(measured) < 0.75
    assert [one for _, one in found] == [measured] * 4


@pytest.mark.parametrize("is_first", [True, False])
def test_a_later_stage_of_a_pipeline_does_not_run_python_while_it_waits_for_the_first_stage(
    is_first: bool, tmp_path: Path
) -> None:
    layer = torch.nn.Linear(2, 2)
    units = [SimpleNamespace(name=name, method="forward") for name in ("", "other")]
    model: Any = SimpleNamespace(
        own_units=units[:1],
        plan=SimpleNamespace(units=units if is_first else units[::-1]),
        module=SimpleNamespace(get_submodule=lambda _: layer),
    )
    clock = WorkClock(prepare(tiny_config({}), {}, tmp_path), model)
    clock.start(3)
    time.sleep(0.01)
    layer(torch.ones(2))
    times = clock.read(3, 0.0)
    assert times is not None
    assert (times["host"] >= 0.01) if is_first else (times["host"] == 0)


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_events_without_a_wait_of_the_cpu(tmp_path: Path) -> None:
    run = prepare(tiny_config({"trainer.device": "cuda"}), {}, tmp_path)
    run.device = "cuda"
    layer = torch.nn.Linear(2048, 2048, device="cuda")
    units = [SimpleNamespace(name="", method="forward")]
    model: Any = SimpleNamespace(
        own_units=units, plan=SimpleNamespace(units=units), module=SimpleNamespace(get_submodule=lambda _: layer)
    )
    clock, x = WorkClock(run, model), torch.randn(8192, 2048, device="cuda")
    layer(x)
    with never_waiting():
        clock.start(3)
        for _ in range(20):
            layer(x)
        clock.stop()
    torch.cuda.synchronize()
    times = clock.read(3, 0.0)
    assert times is not None
    assert 20 * 8192 * 2048**2 * 2 / 2e15 < times["compute"] < 1.0
    assert times["communication"] == 0
