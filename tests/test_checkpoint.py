"""Checkpoints: saved while training goes on, seen only when complete, listed, verified, and free of code."""

import errno
import pickle
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mplug import hookimpl
from mplug.checkpoint import storage
from mplug.checkpoint.folder import complete
from mplug.checkpoint.plain_data import lift
from mplug.errors import RunError, UsageError
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.loop import train
from mplug.training.stepper import DefaultStepper
from mplug_testing.harness import tiny_config

Cli = Callable[..., subprocess.CompletedProcess[str]]


def trained(directory: Path, changes: dict[str, Any], resume_from: Path | None = None, **plugins: object) -> Run:
    settings = {"model.num_layers": 2, "trainer.steps": 6, "trainer.eval_every": 0, "checkpoint.every": 2, **changes}
    named = {f"host/{name}": plugin for name, plugin in plugins.items()}
    run = prepare(tiny_config(settings), named, directory)
    train(run, resume_from)
    return run


def steps(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


# While training goes on.


class Steps:
    """Sets an event when a step begins."""

    def __init__(self, step: int) -> None:
        self.step, self.begun = step, threading.Event()

    @hookimpl
    def step_started(self, run: Run) -> None:
        if run.step == self.step:
            self.begun.set()


class Seen:
    """The checkpoints that observers are told of, and at which step."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []

    @hookimpl
    def checkpoint_saved(self, path: Path) -> None:
        self.told.append((path.name, path.is_dir()))


def test_training_goes_on_while_a_checkpoint_of_an_earlier_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_begun, seen, original = Steps(4), Seen(), storage.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "step_00000002" in str(path):
            assert steps_begun.begun.wait(60), "training waits for the writer"
        original(tensors, path)

    trained(tmp_path / "synchronous", {"checkpoint.asynchronous": False, "checkpoint.keep": 9})
    monkeypatch.setattr(storage, "save_file", save_file)
    trained(tmp_path / "beside", {"checkpoint.keep": 9}, steps=steps_begun, seen=seen)
    assert seen.told == [("step_00000002", True), ("step_00000004", True), ("step_00000006", True)]
    for step in steps(tmp_path / "synchronous"):
        one, other = (
            load_file(tmp_path / name / "checkpoints" / step / "rank00000.safetensors")
            for name in ("synchronous", "beside")
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), step


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_ends_the_run_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    fifth, original = Steps(5), storage.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "step_00000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(storage, "save_file", save_file)
    with pytest.raises(RunError, match=r"step_00000004.*no space left.*step_00000002' is intact"):
        trained(tmp_path, {"trainer.steps": 1000, "checkpoint.asynchronous": asynchronous}, fifth=fifth)
    assert steps(tmp_path) == ["step_00000002"]
    assert asynchronous or not fifth.begun.is_set(), "training goes on after a save that it waited for has failed"


# What lies there.


def test_a_checkpoint_is_read_without_unpickling_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, {})
    newest = complete(tmp_path / "checkpoints")[-1]
    assert {path.suffix for path in newest.iterdir()} == {".safetensors", ".json"}

    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a checkpoint is unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    run = trained(tmp_path, {"trainer.steps": 7}, newest)
    assert run.step == 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of which two checkpoints are kept."""
    path = tmp_path_factory.mktemp("checkpoints")
    trained(path / "runs" / "one", {})
    return path


def test_the_checkpoints_of_a_run_are_listed(cli: Cli, folder: Path) -> None:
    result = cli("checkpoint", "list", cwd=folder)
    assert result.returncode == 0, result.stderr
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["STEP", "SAVED", "LAYOUT", "SIZE", "STATE"]
    assert [row.split()[0] for row in rows] == ["4", "6"]
    assert all(row.endswith("complete") for row in rows)


def test_a_checkpoint_is_shown_with_its_position_and_provenance(cli: Cli, folder: Path) -> None:
    result = cli("checkpoint", "show", "--name", "one", "--step", "4", "--tensors", cwd=folder)
    assert result.returncode == 0, result.stderr
    words = ("step     4, 32 samples", "models/gpt (mplug-gpt", "blocks.0.attn.qkv.weight/exp_avg", "64x32", "float32")
    assert [word for word in words if word not in result.stdout] == []


@pytest.mark.parametrize("words", [("list",), ("show",), ("verify",)], ids=" ".join)
def test_a_run_without_a_checkpoint_is_a_sentence(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    (tmp_path / "runs" / "empty" / "config.yaml").write_text("{}")
    result = cli("checkpoint", *words)
    assert result.returncode == 2
    assert "no complete checkpoint" in result.stderr


# What resists.


class Counter:
    """A plugin whose state is a tensor, of another type after the first save."""

    def __init__(self, name: str = "count") -> None:
        self.name, self.values = name, [torch.tensor(3), torch.tensor(3.5), torch.tensor(4.5)]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.values.pop(0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = [state["count"]]

    @hookimpl
    def state(self) -> dict[str, Any]:
        return {self.name: self}


def test_a_tensor_of_another_type_than_at_the_last_save_is_saved_as_it_is(tmp_path: Path) -> None:
    counter = Counter()
    trained(tmp_path, {}, counter=counter)
    trained(tmp_path, {"trainer.steps": 7}, complete(tmp_path / "checkpoints")[-1], counter=counter)
    found = load_file(complete(tmp_path / "checkpoints")[-1] / "rank00000.safetensors")["/states/count/count@"]
    assert found == 4.5
    assert found.dtype == torch.float32


def test_two_plugins_that_save_a_state_of_one_name_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="host/a and host/b both save a state named 'count'"):
        trained(tmp_path, {}, a=Counter(), b=Counter())


def test_a_plugin_that_the_saved_run_did_not_have_is_named_with_a_remedy(tmp_path: Path) -> None:
    trained(tmp_path, {})
    with pytest.raises(
        UsageError, match=r"has a plugin's state 'count'.*with the plugins that the checkpoint was saved with"
    ):
        trained(tmp_path, {"trainer.steps": 7}, complete(tmp_path / "checkpoints")[-1], counter=Counter())


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": {1: 2}}, "has the key 1"),
        ({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two tensors of the state have the path '/a/b'"),
    ],
)
def test_state_that_would_not_come_back_as_it_was_is_refused(state: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        lift(state, {}, "")


def test_an_old_checkpoint_that_cannot_be_removed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = shutil.rmtree

    def rmtree(path: Path, **named: Any) -> None:
        if ".step_00000002" in str(path):
            if named.get("ignore_errors"):
                return
            raise OSError(errno.EBUSY, "busy")
        original(path, **named)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    trained(tmp_path, {"checkpoint.keep": 1})
    assert steps(tmp_path) == [".step_00000002.partial", "step_00000006"]
    assert "cannot remove" in (tmp_path / "logs" / "rank0.log").read_text()


def test_a_checkpoint_under_way_is_finished_when_the_run_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, original, update = Steps(4), storage.save_file, DefaultStepper.update

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        assert begun.begun.wait(60)
        original(tensors, path)

    def diverging(self: DefaultStepper, lr: float, weight_decay: float) -> Any:
        self.sinks.arena[0] = float("inf") if self.run.step == 4 else 0.0
        return update(self, lr, weight_decay)

    monkeypatch.setattr(storage, "save_file", save_file)
    monkeypatch.setattr(DefaultStepper, "update", diverging)
    with pytest.raises(RunError, match="step 4 has a loss of"):
        trained(tmp_path, {}, begun=begun)
    assert steps(tmp_path) == ["step_00000002"]
