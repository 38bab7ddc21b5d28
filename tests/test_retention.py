"""Which checkpoints stay: the newest valid ones. None is removed or replaced before a valid one is visible."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SMALL, flip_bit, position_of, save, steps, valid

from mplug import hookimpl
from mplug.errors import RunError, UsageError
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.loop import train
from mplug_pretrained.weights import pretrained_of
from mplug_saving import manifest, retention, saver
from mplug_saving.folder import OtherVersion, complete, read_manifest, read_valid
from mplug_saving.names import path_of, step_of
from mplug_saving.newest_valid import choose, newest_readable
from mplug_saving.verified import Verified
from mplug_testing.harness import tiny_config

FILE = "rank00000.safetensors"


def trained(directory: Path, steps: int, keep: int, resume_from: Path | None = None, **observers: object) -> Path:
    """Train to a step, saving every one; the folder of the checkpoints."""
    config = tiny_config({**SMALL, "trainer.steps": steps, "checkpoint.keep": keep})
    run = prepare(config, {f"host/{name}": one for name, one in observers.items()}, directory)
    train(run, resume_from)
    return run.checkpoints


def damage(path: Path) -> None:
    flip_bit(path / FILE)


@pytest.fixture
def two_damaged(tmp_path: Path) -> Path:
    """A folder with checkpoints of three steps, the last two of which are damaged."""
    folder = trained(tmp_path / "base", 3, 3)
    damage(path_of(folder, 3))
    (path_of(folder, 2) / "checkpoint.json").write_text("{")
    return folder


def skipped(folder: Path) -> list[str]:
    """What a run reports that meets these two."""
    return [
        f"mplug: skipped: checkpoint '{path_of(folder, 3)}' is damaged: '{FILE}' has changed since it was saved",
        f"mplug: skipped: checkpoint '{path_of(folder, 2)}' is damaged: 'checkpoint.json' is not valid JSON: "
        f"Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ]


def reported(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("mplug: ")]


# What counts.


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_that_continues_before_damaged_checkpoints_reports_them_and_keeps_valid_ones(
    two_damaged: Path, capfd: pytest.CaptureFixture[str], keep: int
) -> None:
    trained(two_damaged.parent, 4, keep, path_of(two_damaged, 3))
    assert reported(capfd) == [*skipped(two_damaged), "mplug: continuing from step 1"]
    assert steps(two_damaged) == valid(two_damaged) == [3, 4][-keep:]
    logged = (two_damaged.parent / "logs" / "rank0.log").read_text()
    assert "step_00000003': the run continues from the earlier step 1" in logged
    assert "replacing checkpoint" in logged


def test_a_checkpoint_that_is_damaged_while_training_goes_on_does_not_count(tmp_path: Path) -> None:
    class Damage:
        @hookimpl
        def step_started(self, run: Run) -> None:
            if run.step == 4:
                damage(path_of(run.checkpoints, 3))

    folder = trained(tmp_path, 4, 2, damage=Damage())
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


def test_a_checkpoint_of_another_version_is_neither_skipped_nor_removed(tmp_path: Path) -> None:
    folder = trained(tmp_path, 3, 3)
    for step in (1, 3):  # as another version of mplug, of a later format, would have saved it
        file = path_of(folder, step) / "checkpoint.json"
        file.write_text(file.read_text().replace('"format": 2', '"format": 3'))
    run = prepare(tiny_config(SMALL))
    for look in (lambda: newest_readable(folder), lambda: choose(run, path_of(folder, 3), Verified())):
        with pytest.raises(OtherVersion, match="00003' has format 3; this version of mplug reads format 2; use the ve"):
            look()
    position = position_of(tmp_path, 1, path_of(folder, 2))
    with pytest.raises(RunError, match=r"cannot replace checkpoint '.*00003', because another version"):
        save(position, 3)
    save(position, 4)
    save(position, 5)
    assert steps(folder) == [1, 3, 5], "the rule keep=1 removes 2 and 4 alone"


def test_a_save_checks_its_own_manifest_once_and_reads_none_and_makes_its_table_for_new_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    position, checked, tables = position_of(tmp_path, 2), list[int](), list[int]()
    original, of = manifest._check_settings, manifest.TensorTable.of
    monkeypatch.setattr(manifest, "decode", lambda _: pytest.fail("a manifest is read"))
    monkeypatch.setattr(manifest, "_check_settings", lambda facts: (checked.append(facts["step"]), original(facts))[1])
    monkeypatch.setattr(manifest.TensorTable, "of", lambda tensors: (tables.append(position.run.step), of(tensors))[1])
    for step in range(1, 6):
        save(position, step)
    save(position, 5, 1)
    assert checked == [1, 2, 3, 4, 5, 5]
    assert tables == [1, 5], "the layout has not changed, and the second checkpoint of step 5 has files of other names"
    assert steps(position.run.checkpoints) == [4, 5]
    files = [path for path in position.saver.verified._signatures if not path.exists()]
    assert files == [], "what is removed is forgotten"


# Where a run continues.


def test_a_new_run_begins_with_the_newest_valid_weights_of_the_run_that_it_names(
    tmp_path: Path, two_damaged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def beginning_with(path: Path) -> Run:
        settings = {**SMALL, "trainer.steps": 1, "checkpoint.pretrained": str(path)}
        return prepare(tiny_config(settings), directory=tmp_path / "new")

    run = beginning_with(two_damaged.parent)
    assert pretrained_of(run) == path_of(two_damaged, 3), "before launch, files have the right sizes"
    train(run)
    assert reported(capfd) == [*skipped(two_damaged), "mplug: beginning with the weights of step 1"]
    record = json.loads((tmp_path / "new" / "record.json").read_text())
    assert record["pretrained"] == str(path_of(two_damaged, 1))
    (path_of(two_damaged, 3) / FILE).unlink()
    assert pretrained_of(run) == path_of(two_damaged, 1)
    with pytest.raises(UsageError, match="step_00000003' is damaged"):
        train(beginning_with(path_of(two_damaged, 3)))


def test_without_a_valid_checkpoint_one_error_lists_all(tmp_path: Path) -> None:
    folder = trained(tmp_path, 2, 2)
    for path in complete(folder):
        damage(path)
    with pytest.raises(UsageError, match=r"no checkpoint in .*\n.*00002' is damaged.*\n.*00001' is damaged"):
        trained(tmp_path, 3, 2, path_of(folder, 2))
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
        choose(prepare(tiny_config(SMALL)), path_of(folder, 2), Verified())


# Replacing and removing.


@pytest.mark.parametrize("what", ["a replaced file", "an old checkpoint"])
def test_what_cannot_be_removed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    position, folder, replaces = position_of(tmp_path, 1), tmp_path / "checkpoints", what == "a replaced file"
    save(position, 5)

    def busy(remove: Callable[..., None], word: str) -> Callable[..., None]:
        def removed(path: Path, **named: Any) -> None:
            if word not in str(path):
                remove(path, **named)
            elif not named.get("ignore_errors"):
                raise OSError(16, "Device or resource busy")

        return removed

    if replaces:
        monkeypatch.setattr(Path, "unlink", busy(Path.unlink, FILE))
    else:
        monkeypatch.setattr(shutil, "rmtree", busy(shutil.rmtree, ".step_00000005"))
    save(position, 5 if replaces else 6, 1)
    assert read_valid(complete(folder)[-1])["samples"] == 1
    assert "Device or resource busy" in caplog.text
    expected = ["step_00000005"] if replaces else [".step_00000005.partial", "step_00000006"]
    assert sorted(one.name for one in folder.iterdir()) == expected


def test_what_a_failed_save_calls_intact_is_another_valid_checkpoint(tmp_path: Path) -> None:
    position = position_of(tmp_path, 3)
    final = path_of(position.run.checkpoints, 6)
    error = OSError(5, "Input/output error")
    for step in (4, 5, 6):
        save(position, step)
    (path_of(final.parent, 5) / FILE).unlink()
    assert saver._explained(error, final).endswith("step_00000004' is intact")
    (path_of(final.parent, 4) / FILE).unlink()
    assert "intact" not in saver._explained(error, final), "the one that is being replaced is none"


def test_a_reader_sees_every_replaced_checkpoint_in_its_old_or_new_version(tmp_path: Path) -> None:
    position = position_of(tmp_path, 1)
    save(position, 5)
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
    save(position, 5)

    def replaced(file: Any, *arguments: Any, **named: Any) -> int:
        if Path(file).name == "checkpoint.json":
            monkeypatch.setattr(os, "open", original)
            save(position, 5, 1)
        return original(file, *arguments, **named)

    monkeypatch.setattr(os, "open", replaced)
    assert read_manifest(path_of(tmp_path / "checkpoints", 5))["samples"] == 1
