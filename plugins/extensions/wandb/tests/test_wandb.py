"""Weights & Biases: what the file of an offline run holds, read by the messages of the library itself."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("wandb")

from mplug_wandb import WeightsAndBiases
from wandb.proto import wandb_internal_pb2

from mplug import UsageError
from mplug.training.loop import train
from mplug_testing import ExtensionSuite
from mplug_testing.harness import tiny_run

BLOCK, MAGIC = 32768, b":W&B"


def records(path: Path) -> Iterator[Any]:
    """The records of a file of wandb: blocks of chunks, each (checksum, length, type), as in a log of LevelDB."""
    content = path.read_bytes()
    assert content[:4] == MAGIC
    position, whole = 7, b""
    while position + 7 <= len(content):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last chunk
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def history(path: Path) -> dict[int, dict[str, Any]]:
    """By step, the numbers in a file of wandb."""
    found = {}
    for one in records(path):
        if one.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in one.history.item}
            found[one.history.step.num] = {name: value for name, value in items.items() if name[0] != "_"}
    return found


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)


@pytest.mark.wide("loggers")
class TestWeightsAndBiases(ExtensionSuite):
    plugin = "wandb"
    settings = {"extensions.wandb.mode": "offline"}
    files = ("wandb/*",)
    keeps_history = False  # a file for each start: 'wandb sync' joins them by the id of the run
    checks_fields = False  # the tests below check each field: the library writes other files when it has time


def write(directory: Path, steps: range, rank: int = 0, **config: Any) -> None:
    plugin = WeightsAndBiases(WeightsAndBiases.Config(**{"mode": "offline", **config}))
    directory.mkdir(exist_ok=True)
    resolved = {"trainer": {"steps": 8}, "optimizer": {"lr": 0.5}}
    run: Any = SimpleNamespace(rank=rank, directory=directory, config=SimpleNamespace(resolved=lambda: resolved))
    plugin.run_started(run)
    for step in steps:
        record: dict[str, Any] = {"step": step, "loss": 1 / step, "mfu": None, "skipped": False}
        record |= {"val_loss": step / 2} if step % 3 == 0 else {}
        plugin.step_finished(record | {"statistics": {"blocks.0.router/load": [0.25, 0.75]}})
    plugin.run_finished()


@pytest.mark.wide("loggers")
def test_every_number_of_a_record_and_the_settings_are_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "first", range(1, 5), project="ours", entity="team", tags=("a", "b"), group="g", notes="n")
    (path,) = files(tmp_path / "first")
    found = history(path)
    assert list(found) == [1, 2, 3, 4]
    load = {"statistics/blocks.0.router/load/0": 0.25, "statistics/blocks.0.router/load/1": 0.75}
    assert found[1] == {"loss": 1.0, "skipped": 0.0, **load}
    assert found[3] == {"loss": 1 / 3, "skipped": 0.0, "val_loss": 1.5, **load}
    (begun,) = (one.run for one in records(path) if one.WhichOneof("record_type") == "run")
    assert (begun.project, begun.entity, begun.run_group, begun.notes) == ("ours", "team", "g", "n")
    assert (begun.display_name, list(begun.tags)) == ("first", ["a", "b"])
    settings = {one.key: json.loads(one.value_json) for one in begun.config.update}
    assert (settings["trainer"], settings["optimizer"]) == ({"steps": 8}, {"lr": 0.5})
    (end,) = (one.exit for one in records(path) if one.WhichOneof("record_type") == "exit")
    assert end.exit_code == 0


@pytest.mark.wide("loggers")
def test_a_resumed_run_continues_the_run_of_the_same_id(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    write(tmp_path, range(3, 6), every=2, statistics=False, run_name="own")
    first, second = files(tmp_path)
    identity = (tmp_path / "wandb" / "run_id").read_text().strip()
    assert first.name == second.name == f"run-{identity}.wandb"
    names = [one.run.display_name for one in records(second) if one.WhichOneof("record_type") == "run"]
    assert names == ["own"]
    assert history(second) == {
        3: {"loss": 1 / 3, "skipped": 0.0, "val_loss": 1.5},
        4: {"loss": 0.25, "skipped": 0.0},
    }


def test_only_rank_0_writes_and_a_disabled_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(1, 3), rank=1)
    write(tmp_path, range(1, 3), mode="disabled")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write(tmp_path, range(1, 3), mode=None)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_of_the_library_is_reported_once_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def log(self, *_: Any, **__: Any) -> None:
            raise BrokenPipeError("its process has ended")

    monkeypatch.setattr("wandb.init", lambda **_: Broken())
    run = tiny_run({"trainer.steps": 3, "extensions.wandb": {"mode": "offline"}})
    run.directory = tmp_path
    train(run)
    assert run.step == 3
    assert capsys.readouterr().err.count("extensions/wandb") == 1
    assert (tmp_path / "logs" / "rank0.log").read_text().count("the run continues") == 1


def test_a_run_without_the_library_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mplug_wandb.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="needs the package 'wandb'; pip install wandb"):
        WeightsAndBiases(WeightsAndBiases.Config()).configure()


def test_an_offline_run_sends_no_reports_of_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    monkeypatch.setattr("wandb.init", lambda **_: None)
    write(tmp_path, range(0))
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
