"""Checkpoints: saved while training goes on, seen only when complete, listed, verified, and free of code."""

import errno
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoints import position_of, save
from command_line import Cli
from crafts import WEIGHT, change, nested
from safetensors.torch import load_file

from mplug import hookimpl
from mplug.errors import RunError, UsageError
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.loop import train
from mplug.training.stepper import DefaultStepper
from mplug_saving import storage
from mplug_saving.folder import complete, read_manifest
from mplug_saving.manifest import DEEPEST, TensorTable, decode, encode
from mplug_saving.plain_data import lift
from mplug_saving.reading import _unique
from mplug_testing.harness import tiny_config


def trained(directory: Path, changes: dict[str, Any], resume_from: Path | None = None, **plugins: object) -> Run:
    settings = {"model.num_layers": 2, "trainer.steps": 6, "trainer.eval_every": 0, "checkpoint.every": 2, **changes}
    named = {f"host/{name}": plugin for name, plugin in plugins.items()}
    run = prepare(tiny_config(settings), named, directory)
    train(run, resume_from)
    return run


def steps(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def newest(directory: Path) -> Path:
    return complete(directory / "checkpoints")[-1]


# While training goes on.


class Begins:
    """Sets an event when a step begins."""

    def __init__(self, step: int) -> None:
        self.step, self.event = step, threading.Event()

    @hookimpl
    def step_started(self, run: Run) -> None:
        if run.step == self.step:
            self.event.set()


class Seen:
    """The checkpoints that observers are told of."""

    def __init__(self) -> None:
        self.paths: list[tuple[str, bool]] = []

    @hookimpl
    def checkpoint_saved(self, path: Path) -> None:
        self.paths.append((path.name, path.is_dir()))


def test_a_ranks_file_is_on_the_disk_before_the_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, original = dict[str, list[Path]](), storage.sync_path

    def sync(path: Path) -> None:
        synced[path.name] = complete(tmp_path / "checkpoints")
        original(path)

    monkeypatch.setattr(storage, "sync_path", sync)
    save(position_of(tmp_path, 1), 1)
    assert synced[storage.file_of(0)] == []
    assert len(complete(tmp_path / "checkpoints")) == 1


@pytest.fixture
def before_writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Do something before the file of a step is written."""
    original = storage.save_file

    def set_to(step: int, action: Callable[[], None]) -> None:
        def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
            if f"step_{step:08d}" in str(path):
                action()
            original(tensors, path)

        monkeypatch.setattr(storage, "save_file", save_file)

    return set_to


def test_training_goes_on_while_a_checkpoint_of_an_earlier_step_is_written(
    tmp_path: Path, before_writing: Callable[..., None]
) -> None:
    fourth, seen, folders = Begins(4), Seen(), [tmp_path / "synchronous", tmp_path / "beside"]

    def wait() -> None:
        assert fourth.event.wait(60), "training waits for the writer"

    trained(folders[0], {"checkpoint.asynchronous": False, "checkpoint.keep": 9})
    before_writing(2, wait)
    trained(folders[1], {"checkpoint.keep": 9}, fourth=fourth, seen=seen)
    assert seen.paths == [("step_00000002", True), ("step_00000004", True), ("step_00000006", True)]
    for step in steps(folders[0]):
        one, other = (load_file(folder / "checkpoints" / step / "rank00000.safetensors") for folder in folders)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), step


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_ends_the_run_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, before_writing: Callable[..., None], asynchronous: bool
) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fifth = Begins(5)
    before_writing(4, fail)
    with pytest.raises(RunError, match=r"step_00000004.*no space left.*step_00000002' is intact"):
        trained(tmp_path, {"trainer.steps": 1000, "checkpoint.asynchronous": asynchronous}, fifth=fifth)
    assert steps(tmp_path) == ["step_00000002"]
    assert asynchronous or not fifth.event.is_set(), "training goes on after a save that it waited for has failed"


def test_a_checkpoint_under_way_is_finished_when_the_run_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_writing: Callable[..., None]
) -> None:
    fourth, update = Begins(4), DefaultStepper.update

    def diverging(self: DefaultStepper, lr: float, weight_decay: float) -> Any:
        self.sinks.arena[0] = float("inf") if self.run.step == 4 else 0.0
        return update(self, lr, weight_decay)

    before_writing(2, lambda: fourth.event.wait(60))
    monkeypatch.setattr(DefaultStepper, "update", diverging)
    with pytest.raises(RunError, match="step 4 has a loss of"):
        trained(tmp_path, {}, fourth=fourth)
    assert steps(tmp_path) == ["step_00000002"]


# What lies there.


def test_a_checkpoint_is_read_without_unpickling_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, {})
    assert {path.suffix for path in newest(tmp_path).iterdir()} == {".safetensors", ".json"}
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("a checkpoint is unpickled"))
    assert trained(tmp_path, {"trainer.steps": 7}, newest(tmp_path)).step == 7


def test_the_checkpoints_of_a_run_are_listed_and_shown_with_position_and_provenance(
    cli_here: Cli, tmp_path: Path
) -> None:
    trained(tmp_path / "runs" / "one", {})
    result = cli_here("checkpoint", "list")
    assert result.returncode == 0, result.stderr
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["STEP", "SAVED", "LAYOUT", "SIZE", "STATE"]
    assert [row.split()[0] for row in rows] == ["4", "6"]
    assert all(row.endswith("complete") for row in rows)
    result = cli_here("checkpoint", "show", "--name", "one", "--step", "4", "--tensors")
    assert result.returncode == 0, result.stderr
    words = ("step     4, 32 samples", "models/gpt (mplug-gpt", "blocks.0.attn.qkv.weight/exp_avg", "64x32", "float32")
    assert [word for word in words if word not in result.stdout] == []


def test_show_escapes_values_and_names_of_a_checkpoint(
    cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(plain: dict[str, Any]) -> None:
        plain["changes"] = [{"step": 1, "field": "data.path", "old": "a\x1b[2J", "new": "b\nc"}]
        plain["tensors"]["\x1b[2J/weight"] = plain["tensors"].pop(WEIGHT)

    trained(tmp_path / "runs" / "one", {"trainer.steps": 1})
    change(newest(tmp_path / "runs" / "one"), edit)
    monkeypatch.setattr("mplug_saving.folder.read_described", read_manifest)  # the file has the old name
    result = cli_here("checkpoint", "show", "--tensors")
    assert result.returncode == 0, result.stderr
    assert "data.path: a\\x1b[2J -> b\\nc, from step 2 on" in result.stdout
    assert "\\x1b[2J/weight" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_a_run_without_a_checkpoint_is_a_sentence(cli_here: Cli, tmp_path: Path, command: str) -> None:
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    (tmp_path / "runs" / "empty" / "config.yaml").write_text("{}")
    result = cli_here("checkpoint", command)
    assert result.returncode == 2
    assert "no complete checkpoint" in result.stderr


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    save(position_of(tmp_path, 1), 1)
    change(newest(tmp_path), lambda plain: plain["states"].update(best={"loss": float("inf")}))
    manifest = read_manifest(newest(tmp_path))
    assert manifest["states"]["best"]["loss"] == float("inf"), "the state of a plugin may be infinite"
    head = {name: value for name, value in manifest.items() if name != "tensors"}
    table = TensorTable.of(manifest["tensors"])
    assert decode(encode(head, table).encode()) == manifest
    with pytest.raises(ValueError, match="levels deep"):
        encode({**head, "states": {"a": nested(DEEPEST + 1)}}, table)
    with pytest.raises(ValueError, match="which is not a file of the checkpoint"):
        encode({**head, "files": {"x.safetensors": {"bytes": 1, "crc32": 1}}}, table)
    (name, saved), *_ = manifest["tensors"].items()
    with pytest.raises(ValueError, match="its chunks overlap"):
        TensorTable.of({name: {**saved, "chunks": [*saved["chunks"], *saved["chunks"]]}})


def test_equal_keys_are_found_in_linear_time() -> None:
    """The reference counts comparisons, not seconds: each key is hashed once and compared with its equal alone."""
    compared = [0]

    class Key(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared[0] += 1
            return str.__eq__(self, other)

    pairs = [(Key(number), None) for number in [*range(2000), 1999]]
    with pytest.raises(ValueError, match="'1999' twice"):
        _unique(pairs)
    assert compared[0] < 100


# The state of plugins.


class Counter:
    """A plugin that saves the next of these states, and keeps the state that it loads."""

    def __init__(self, *states: Any) -> None:
        self.states, self.loaded = list[Any](states), cast(Any, None)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.states.pop(0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["count"]
        self.states = [self.loaded]

    @hookimpl
    def state(self) -> dict[str, Any]:
        return {"count": self}


def test_the_state_of_a_plugin_is_saved_and_loaded(tmp_path: Path) -> None:
    plain = {"rate": 0.1, "name": "ü", "list": [1, 2.5, None], "nested": {"on": True, "ten": {}}}
    tensors = {"load": torch.arange(6.0).view(2, 3), "nested": {"bias": torch.tensor(7)}}
    trained(tmp_path, {"trainer.steps": 2}, counter=Counter({"plain": plain, **tensors}))
    found = Counter()
    trained(tmp_path, {"trainer.steps": 3}, newest(tmp_path), counter=found)
    assert found.loaded["plain"] == plain
    assert torch.equal(found.loaded["load"], tensors["load"])
    assert torch.equal(found.loaded["nested"]["bias"], tensors["nested"]["bias"])


def test_a_tensor_of_another_type_than_at_the_last_save_is_saved_as_it_is(tmp_path: Path) -> None:
    counter = Counter(torch.tensor(3), torch.tensor(3.5), torch.tensor(4.5))
    trained(tmp_path, {}, counter=counter)
    trained(tmp_path, {"trainer.steps": 7}, newest(tmp_path), counter=counter)
    found = load_file(newest(tmp_path) / "rank00000.safetensors")["/states/count/count@"]
    assert found == 4.5
    assert found.dtype == torch.float32


def test_plugins_whose_states_do_not_fit_the_checkpoint_or_each_other_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="host/a and host/b both save a state named 'count'"):
        trained(tmp_path, {}, a=Counter(), b=Counter())
    trained(tmp_path, {})
    words = r"has a plugin's state 'count'.*with the plugins that the checkpoint was saved with"
    with pytest.raises(UsageError, match=words):
        trained(tmp_path, {"trainer.steps": 7}, newest(tmp_path), counter=Counter())


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"a": {1: 2}}, "has the key 1"),
        ({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two tensors of the state have the path '/a/b'"),
    ],
)
def test_state_that_would_not_come_back_as_it_was_is_refused(state: dict[str, Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        lift(state, {}, "")
