"""Changes of the layout of a running run: the same losses, or a refusal after which the run goes on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import mplug_heal.relayouts
from mplug import hookimpl
from mplug.checkpoint.folder import complete, read_manifest
from mplug.run.metrics_file import read_records
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.loop import train
from mplug.training.observers import MetricsFile
from mplug_heal.requests import Answer, ask
from mplug_testing import run_workers
from mplug_testing.harness import EXACT, as_rank, tiny_config

STEPS = 8
SETTINGS = {
    "model.num_layers": 4,
    "trainer.steps": STEPS,
    "trainer.eval_every": 4,
    "trainer.precision": "fp64",
    "trainer.global_batch_size": 8,
    "checkpoint.every": 0,
}


class Asks:
    """On rank 0, asks for a layout at the end of some steps, and keeps the answers."""

    def __init__(self, layouts: Mapping[int, str]) -> None:
        self.layouts = layouts

    @hookimpl
    def step_finished(self, run: Run, record: dict[str, Any]) -> None:
        assert run.directory is not None
        layout = self.layouts.get(record["step"])
        if run.rank == 0 and layout is not None:
            ask(run.directory, layout)


def trained(
    folder: str, layout: str, requests: Mapping[int, str], settings: Mapping[str, Any] = {}, resume: Path | None = None
) -> str:
    """Be one rank of a run that is asked for other layouts after some steps; the layout at its end."""
    mplug_heal.relayouts.INTERVAL = 0.0
    config = tiny_config({**SETTINGS, **settings, "parallel.layout": layout})
    observers = {"host/asks": Asks(requests), "host/metrics": MetricsFile()}
    run = as_rank(prepare(config, observers, Path(folder)))
    train(run, resume)
    return run.config.parallel.layout


def figures(folder: Path) -> list[dict[str, float]]:
    names = ("step", "loss", "grad_norm", "tokens", "val_loss")
    return [{name: record[name] for name in names if name in record} for record in read_records(folder)]


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == STEPS
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=EXACT), (name, other["step"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    trained(str(folder), "", {})
    return figures(folder)


def answer(folder: Path) -> Answer:
    return Answer(**json.loads((folder / "relayout-answer.json").read_text()))


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return found


def test_a_run_that_changes_its_layout_three_times_gives_the_losses_of_one_process(
    tmp_path: Path, undisturbed: list[dict[str, float]]
) -> None:
    requests = {1: "tp4", 3: "pp2dp2", 5: "fsdp4"}
    layouts = run_workers(4, trained, str(tmp_path), "dp2tp2", requests)
    assert layouts == ["fsdp4"] * 4
    assert_same(figures(tmp_path), undisturbed)
    changes = record(tmp_path)["relayouts"]
    assert [(one["step"], one["old"], one["new"]) for one in changes] == [
        (2, "dp2tp2", "tp4"),
        (4, "tp4", "pp2dp2"),
        (6, "pp2dp2", "fsdp4"),
    ]
    assert all(one["bytes"] > 0 for one in changes)
    (checkpoint,) = complete(tmp_path / "checkpoints")
    manifest = read_manifest(checkpoint)
    assert manifest["layout"] == "fsdp4"
    moved = [change for change in manifest["changes"] if change["field"] == "parallel.layout"]
    assert [change["step"] for change in moved] == [2, 4, 6]
