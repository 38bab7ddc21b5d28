"""Which checkpoints stay: the newest valid ones. None is removed or replaced before a valid one is visible."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import flip_bit, valid_in

from mplug import hookimpl
from mplug.checkpoint import manifest, retention, saver
from mplug.checkpoint.folder import OtherVersion, complete, read_manifest, read_valid
from mplug.checkpoint.names import path_of, step_of
from mplug.checkpoint.newest_valid import choose, newest_readable
from mplug.checkpoint.pretrained import pretrained_of
from mplug.checkpoint.verified import Verified
from mplug.errors import RunError, UsageError
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug.training.loop import train
from mplug.training.position import Position
from mplug_testing.harness import tiny_config

SETTINGS = {"model.num_layers": 1, "trainer.eval_every": 0, "checkpoint.every": 1, "checkpoint.asynchronous": False}
FILE = "rank00000.safetensors"


def trained(directory: Path, steps: int, keep: int, resume_from: Path | None = None, **observers: object) -> Path:
    """Train to a step, saving every one; the folder of the checkpoints."""
    settings = {**SETTINGS, "trainer.steps": steps, "checkpoint.keep": keep}
    run = prepare(tiny_config(settings), {f"host/{name}": one for name, one in observers.items()}, directory)
    train(run, resume_from)
    return run.checkpoints


def damage(path: Path) -> None:
    """Flip a bit of a file of a checkpoint."""
    flip_bit(path / FILE)


def steps(folder: Path) -> list[int]:
    return [step_of(path) for path in complete(folder)]


def valid(folder: Path) -> list[int]:
    """The steps of the checkpoints that can be loaded."""
    return [step_of(path) for path in valid_in(folder)]


# What counts.


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_that_continues_before_damaged_checkpoints_keeps_valid_ones(tmp_path: Path, keep: int) -> None:
    folder = trained(tmp_path, 3, 3)
    for step in (2, 3):
        damage(path_of(folder, step))
    trained(tmp_path, 4, keep, path_of(folder, 3))
    assert steps(folder) == valid(folder) == [3, 4][-keep:]
    told = (tmp_path / "logs" / "rank0.log").read_text()
    assert "step_00000003': the run continues from the earlier step 1" in told
    assert "replacing checkpoint" in told


class Damage:
    """Damages the checkpoint before the newest when a step begins, while training goes on."""

    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def step_started(self, run: Run) -> None:
        if run.step == self.step:
            damage(path_of(run.checkpoints, self.step - 1))


def test_a_checkpoint_that_is_damaged_while_training_goes_on_does_not_count(tmp_path: Path) -> None:
    folder = trained(tmp_path, 4, 2, damage=Damage(4))
    assert (steps(folder), valid(folder)) == ([2, 3, 4], [2, 4])
    assert "does not count towards checkpoint.keep" in (tmp_path / "logs" / "rank0.log").read_text()


def test_checkpoints_are_read_once_if_another_process_has_saved_them_and_else_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, original = [], retention.verify

    def verify(path: Path, manifest: Any, names: Any) -> None:
        read.extend([step_of(path)] * len(names))
        original(path, manifest, names)

    monkeypatch.setattr(retention, "verify", verify)
    folder = trained(tmp_path, 4, 3)
    assert read == []
    trained(tmp_path, 6, 4, path_of(folder, 4))
    assert read == [3], "of the save of step 5 nothing is removed, and step 2 goes without being read"


def make_newer(path: Path) -> None:
    """As another version of mplug, of a later format, would have saved it."""
    manifest = path / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 3'))


def test_a_checkpoint_of_another_version_is_neither_skipped_nor_removed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path, 3, 3)
    make_newer(path_of(folder, 1))
    make_newer(path_of(folder, 3))
    run = prepare(tiny_config(SETTINGS))
    for look in (lambda: newest_readable(folder), lambda: choose(run, path_of(folder, 3), Verified())):
        with pytest.raises(
            OtherVersion, match="00003' has format 3; this version of mplug reads format 2; use the version"
        ):
            look()
    position = position_of(tmp_path, 1, path_of(folder, 2))
    with pytest.raises(RunError, match=r"cannot replace checkpoint '.*00003', because another version"):
        save(position, 3, 0)
    save(position, 4, 0)
    save(position, 5, 0)
    assert steps(folder) == [1, 3, 5], "the rule keep=1 removes 2 and 4 alone"


def test_a_save_checks_its_own_manifest_once_and_reads_none_and_makes_its_table_for_new_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    position, checked, tables = position_of(tmp_path, 2), list[int](), list[int]()
    original, of = manifest._check_settings, manifest.TensorTable.of

    def check(facts: Any) -> None:
        checked.append(facts["step"])
        original(facts)

    def made(tensors: Any) -> Any:
        tables.append(position.run.step)
        return of(tensors)

    monkeypatch.setattr(manifest, "decode", lambda _: pytest.fail("a manifest is read"))
    monkeypatch.setattr(manifest, "_check_settings", check)
    monkeypatch.setattr(manifest.TensorTable, "of", made)
    for step in range(1, 6):
        save(position, step, 0)
    save(position, 5, 1)
    assert checked == [1, 2, 3, 4, 5, 5]
    assert tables == [1, 5], "the layout has not changed, and the second checkpoint of step 5 has files of other names"
    assert steps(position.run.checkpoints) == [4, 5]
    files = [path for path in position.saver.verified._signatures if not path.exists()]
    assert files == [], "what is removed is forgotten"


# Where a run continues.


def test_resuming_reports_the_checkpoints_that_it_skips(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = trained(tmp_path, 3, 3)
    damage(path_of(folder, 3))
    (path_of(folder, 2) / "checkpoint.json").write_text("{")
    trained(tmp_path, 4, 3, path_of(folder, 3))
    told = capfd.readouterr().err.splitlines()
    assert [line for line in told if line.startswith("mplug: ")] == [
        f"mplug: skipped: checkpoint '{path_of(folder, 3)}' is damaged: '{FILE}' has changed since it was saved",
        f"mplug: skipped: checkpoint '{path_of(folder, 2)}' is damaged: 'checkpoint.json' is not valid JSON: "
        f"Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "mplug: continuing from step 1",
    ]
    assert valid(folder)[-1] == 4


def test_a_new_run_begins_with_the_newest_valid_weights_of_the_run_that_it_names(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path / "base", 3, 3)
    damage(path_of(folder, 3))
    (path_of(folder, 2) / "checkpoint.json").write_text("{")

    def beginning_with(path: Path) -> Run:
        settings = {**SETTINGS, "trainer.steps": 1, "checkpoint.pretrained": str(path)}
        return prepare(tiny_config(settings), directory=tmp_path / "new")

    run = beginning_with(tmp_path / "base")
    assert pretrained_of(run) == path_of(folder, 3), "before launch, files have the right sizes"
    train(run)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("mplug: ")]
    reason = f"'{FILE}' has changed since it was saved"
    assert told[0] == f"mplug: skipped: checkpoint '{path_of(folder, 3)}' is damaged: {reason}"
    assert told[1].startswith(f"mplug: skipped: checkpoint '{path_of(folder, 2)}' is damaged: 'checkpoint.json'")
    assert told[2:] == ["mplug: beginning with the weights of step 1"]
    record = json.loads((tmp_path / "new" / "record.json").read_text())
    assert record["pretrained"] == str(path_of(folder, 1))
    (path_of(folder, 3) / FILE).unlink()
    assert pretrained_of(run) == path_of(folder, 1)
    with pytest.raises(UsageError, match="step_00000003' is damaged"):
        train(beginning_with(path_of(folder, 3)))


def test_without_a_valid_checkpoint_one_error_lists_all(tmp_path: Path) -> None:
    folder = trained(tmp_path, 2, 2)
    for path in complete(folder):
        damage(path)
    with pytest.raises(UsageError) as raised:
        trained(tmp_path, 3, 2, path_of(folder, 2))
    assert "no checkpoint in" in str(raised.value)
    assert [f"step_0000000{step}' is damaged" in str(raised.value) for step in (1, 2)] == [True, True]
    assert steps(folder) == [1, 2], "a run that cannot begin removes nothing"
    for path in complete(folder):
        (path / FILE).unlink()
    with pytest.raises(UsageError, match=r"no checkpoint in .* is valid:\n.*00002' .*missing\n.*00001' .*missing"):
        newest_readable(folder)


def test_a_checkpoint_that_cannot_be_read_for_now_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, original = trained(tmp_path, 2, 2), os.open

    def failing(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith(FILE):
            raise OSError(5, "Input/output error")
        return original(path, *arguments, **named)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(RunError, match=r"cannot read checkpoint .*step_00000002.*Input/output error"):
        choose(prepare(tiny_config(SETTINGS)), path_of(folder, 2), Verified())


# Replacing.


def position_of(directory: Path, keep: int, resume_from: Path | None = None) -> Position:
    """A run that can save, and has taken no step."""
    run = prepare(tiny_config({**SETTINGS, "trainer.steps": 9, "checkpoint.keep": keep}), directory=directory)
    position = Position(run, build(run))
    if resume_from is not None:
        position.load(position.choose(resume_from))
    return position


def save(position: Position, step: int, samples: int) -> None:
    """Save a step; `samples` tells two checkpoints of it apart."""
    position.run.step, position.samples = step, samples
    position.save()


def test_an_old_file_that_cannot_be_removed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    position, original = position_of(tmp_path, 1), Path.unlink
    save(position, 5, 0)

    def unlink(path: Path, **named: Any) -> None:
        if path.name == FILE:
            raise OSError(16, "Device or resource busy")
        original(path, **named)

    monkeypatch.setattr(Path, "unlink", unlink)
    save(position, 5, 1)
    path = path_of(tmp_path / "checkpoints", 5)
    assert read_valid(path)["samples"] == 1
    assert "Device or resource busy" in caplog.text
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_what_a_failed_save_calls_intact_is_another_valid_checkpoint(tmp_path: Path) -> None:
    position = position_of(tmp_path, 3)
    final = path_of(position.run.checkpoints, 6)
    error = OSError(5, "Input/output error")
    for step in (4, 5, 6):
        save(position, step, 0)
    (path_of(final.parent, 5) / FILE).unlink()
    assert saver._explained(error, final).endswith("step_00000004' is intact")
    (path_of(final.parent, 4) / FILE).unlink()
    assert "intact" not in saver._explained(error, final), "the one that is being replaced is none"


def test_a_reader_sees_every_replaced_checkpoint_in_its_old_or_new_version(tmp_path: Path) -> None:
    position = position_of(tmp_path, 1)
    save(position, 5, 0)
    path, seen, failures, done = path_of(tmp_path / "checkpoints", 5), set[int](), list[str](), threading.Event()

    def poll() -> None:
        while not done.is_set():
            try:
                assert complete(path.parent) == [path]
                seen.add(read_valid(path)["samples"])
            except Exception as error:
                failures.append(repr(error))

    reader = threading.Thread(target=poll)
    reader.start()
    for version in range(1, 15):
        save(position, 5, version)
    done.set()
    reader.join()
    assert failures == []
    assert len(seen) > 1, "the reader has polled while the checkpoint was replaced"
    assert len(list(path.iterdir())) == 2, "the files of the old version are removed"


def test_a_manifest_that_is_replaced_while_it_is_opened_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    position, original = position_of(tmp_path, 1), os.open
    save(position, 5, 0)
    path = path_of(tmp_path / "checkpoints", 5)

    def replaced(file: Any, *arguments: Any, **named: Any) -> int:
        if Path(file).name == "checkpoint.json":
            monkeypatch.setattr(os, "open", original)
            save(position, 5, 1)
        return original(file, *arguments, **named)

    monkeypatch.setattr(os, "open", replaced)
    assert read_manifest(path)["samples"] == 1


CALLS = ("mkdir", "open", "rename", "replace", "unlink", "rmdir", "fsync", "write", "lstat")
"""Functions of `os` before which a process dies; between two of them it changes nothing on the disk."""


def count_calls(die_at: int | None) -> list[int]:
    """Count the calls of CALLS, and die before one of them. Returns a list that holds the count."""
    count = [0]

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == die_at:
                os._exit(9)
            return original(*arguments, **named)

        return call

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))
    return count


def in_child(action: Callable[[], None], die_at: int | None) -> int:
    """Do something in a fork, which may die at a call. Returns the number of calls, at most 255, or 0 if it died."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            count = count_calls(die_at)
            action()
            status = 100 + count[0]
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 9 or 100 < status < 255, status
    return max(0, status - 100)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.wide("kills")), 9])
@pytest.mark.parametrize("case", ["a replaced checkpoint", "an old checkpoint", "a damaged later checkpoint"])
def test_a_process_that_dies_between_two_system_calls_leaves_a_valid_checkpoint(
    tmp_path: Path, case: str, every: int
) -> None:
    folder, backup = tmp_path / "run" / "checkpoints", tmp_path / "backup"
    position = position_of(tmp_path / "run", 1)
    save(position, 5, 1)
    step, allowed = 6, {5, 6}
    if case == "a replaced checkpoint":
        step, allowed = 5, {5}
    if case == "a damaged later checkpoint":
        shutil.copytree(path_of(folder, 5), path_of(folder, 7))
        position = position_of(tmp_path / "run", 1, path_of(folder, 5))
    folder.rename(backup)
    for die_at in range(1, 200, every):
        shutil.copytree(backup, folder, copy_function=os.link)
        finished = in_child(lambda: save(position, step, 2), die_at)
        found = valid(folder)
        assert found, f"no valid checkpoint after call {die_at}"
        assert set(found) <= allowed
        if case == "a replaced checkpoint":
            assert steps(folder) == [5]
        in_child(lambda: save(position, step, 3), None)  # the next one mends what the dead one has left
        assert steps(folder) == valid(folder) == [step]
        assert read_manifest(path_of(folder, step))["samples"] == 3
        assert [path.name for path in folder.glob(".*")] == []
        assert len(list(path_of(folder, step).iterdir())) == 2
        shutil.rmtree(folder)
        if finished:
            assert die_at > 20
            return
    raise AssertionError("the process has made more calls than were tried")
