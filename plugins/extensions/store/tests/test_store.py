"""Copies of checkpoints in a store: what is visible at every moment, also after a kill, and what a store refuses."""

import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fsspec")

from click.testing import CliRunner
from mplug_store import CopiesCheckpoints
from mplug_store.address import Store, StoreError
from mplug_store.checkpoints import MANIFEST, prune, stored
from mplug_store.command import command
from mplug_store.download import download_run, newest_first
from mplug_store.folders import Folders
from mplug_store.upload import Copy, all_files, copy_alone, publish

from mplug import RunError, UsageError
from mplug_testing import ExtensionSuite


@pytest.mark.wide("loggers")
class TestCopiesCheckpoints(ExtensionSuite):
    plugin = "store"
    settings = {"extensions.store.address": "memory://suite"}
    files = ("store.json",)
    checks_fields = False  # the tests below check each field: what they change is in the store


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "runs" / "first"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("trainer: {steps: 9}\n")
    (directory / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"memory://{tmp_path.name}-{id(tmp_path)}/first")


def saved(directory: Path, step: int, ranks: int = 2, salt: bytes = b"") -> Path:
    """A checkpoint as a save leaves it, with files of bytes that depend on the step and the rank."""
    path = directory / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    files = {}
    for rank in range(ranks):
        content = b"%d of %d" % (rank, step) * 1000 + salt
        (path / f"rank{rank:05d}.safetensors").write_bytes(content)
        files[f"rank{rank:05d}.safetensors"] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (path / MANIFEST).write_text(json.dumps({"step": step, "files": files}))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps(store: Store) -> list[int]:
    return [one.step for one in reversed(newest_first(store))]


# One checkpoint.


def test_a_run_comes_back_bit_for_bit_with_the_complete_lines_of_its_metrics(run: Path, store: Store) -> None:
    (run / "published" / "form").mkdir(parents=True)
    (run / "published" / "form" / "config.json").write_text("{}")
    (run / ".lock").mkdir()
    (run / "logs").mkdir()
    (run / "logs" / "rank0.log").write_text("not copied")
    path = saved(run, 5)
    copy_alone(store, path, run)
    download_run(store, run.parent / "second")
    expected = contents(path)
    assert contents(run.parent / "second" / "checkpoints" / path.name) == expected
    others = {name: one for name, one in contents(run.parent / "second").items() if not name.startswith("checkpoints")}
    assert others == {
        "config.yaml": b"trainer: {steps: 9}\n",
        "metrics.jsonl": b'{"step": 1}\n',
        "published/form/config.json": b"{}",
    }


def test_a_copy_is_visible_only_when_the_files_of_all_ranks_are_there(run: Path, store: Store) -> None:
    path = saved(run, 5)
    copies = [Copy(path, all_files(rank, 2)) for rank in range(2)]
    copies[0].upload(store)
    with pytest.raises(StoreError, match=r"another rank has not copied 'rank00001.safetensors' to .* within 0.1 s"):
        publish(store, copies[0].manifest, run, 0.1)
    assert steps(store) == []
    copies[1].upload(store)
    publish(store, copies[0].manifest, run, 0.1)
    assert steps(store) == [5]


def test_a_checkpoint_that_the_run_removes_meanwhile_is_still_copied(run: Path, store: Store) -> None:
    path = saved(run, 5, ranks=1)
    expected, copy = contents(path), Copy(path, all_files(0, 1))
    for file in path.iterdir():
        file.unlink()
    copy.upload(store)
    publish(store, copy.manifest, run, 1)
    download_run(store, run.parent / "second")
    assert contents(run.parent / "second" / "checkpoints" / path.name) == expected


def test_a_file_that_has_changed_on_the_disk_is_not_copied(run: Path, store: Store) -> None:
    path = saved(run, 5, ranks=1)
    damaged = bytearray((path / "rank00000.safetensors").read_bytes())
    damaged[7] ^= 1
    (path / "rank00000.safetensors").write_bytes(damaged)
    with pytest.raises(RunError, match=r"rank00000.safetensors' is damaged, so the checkpoint is not copied"):
        copy_alone(store, path, run)
    assert store.sizes() == {}


def test_a_damaged_copy_is_skipped_for_the_one_before_it_and_refused_if_it_is_named(run: Path, store: Store) -> None:
    for step in (5, 6):
        copy_alone(store, saved(run, step), run)
    name = f"{stored(store)[-1].folder}/rank00001.safetensors"
    store.files.pipe_file(store._path(name), b"x" * store.sizes()[name])
    one, skipped = download_run(store, run.parent / "second")
    assert one.step == 5
    assert skipped == [f"'{store.address}/{name}' is damaged"]
    with pytest.raises(UsageError, match="is damaged"):
        download_run(store, run.parent / "third", step=6)
    with pytest.raises(UsageError, match=r"has no checkpoint of step 7 \(available steps: 5, 6\)"):
        download_run(store, run.parent / "third", step=7)
    assert sorted(path.name for path in run.parent.iterdir()) == ["first", "second"]


# Several checkpoints.


def test_the_newest_copies_stay_and_later_steps_and_rests_of_uploads_go(run: Path, store: Store) -> None:
    copies = {step: Copy(saved(run, step), all_files(0, 1)) for step in (2, 4, 6, 8, 10)}
    for step, copy in copies.items():
        copy.upload(store)
        if step != 4:  # killed before its manifest was written
            publish(store, copy.manifest, run, 0)
    assert steps(store) == [2, 6, 8, 10]
    prune(store, copies[8].manifest, keep=2)  # the run has gone back to an earlier step, and has saved step 8
    assert [one.step for one in stored(store)] == steps(store) == [6, 8]
    prune(store, copies[8].manifest, keep=1)
    assert [one.step for one in stored(store)] == [8]


def test_files_of_a_later_step_that_other_ranks_copy_already_are_left_alone(run: Path, store: Store) -> None:
    copy_alone(store, saved(run, 2), run)
    later, copy = Copy(saved(run, 6), all_files(1, 2)), Copy(saved(run, 4), all_files(0, 1))
    later.upload(store)
    copy.upload(store)
    publish(store, copy.manifest, run, 0)
    prune(store, copy.manifest, keep=1)
    assert [(one.step, one.visible) for one in stored(store)] == [(4, True), (6, False)]


def test_a_step_that_is_saved_again_replaces_its_copy_and_never_overwrites_a_file(run: Path, store: Store) -> None:
    copy_alone(store, saved(run, 4, salt=b"old"), run)
    (run / "checkpoints").rename(run / "old")
    copy = Copy(saved(run, 4, salt=b"new"), all_files(0, 1))
    copy.upload(store)
    download_run(store, run.parent / "before")
    assert contents(run.parent / "before" / "checkpoints") == contents(run / "old")
    publish(store, copy.manifest, run, 0)
    prune(store, copy.manifest, keep=2)
    download_run(store, run.parent / "after")
    assert contents(run.parent / "after" / "checkpoints") == contents(run / "checkpoints")


# Kills.

KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from mplug_store.address import Store
from mplug_store.checkpoints import prune
from mplug_store.upload import Copy, all_files, publish

bucket, path, directory, rank, world_size, kills = *map(Path, sys.argv[1:4]), *map(int, sys.argv[4:])

def copy(number):
    store, done = Store(f"file://{bucket}{number}/first"), 0

    def counted(call):
        def wrapped(*arguments, **options):
            nonlocal done
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return call(*arguments, **options)
        return wrapped

    def partly(*arguments, **options):
        file = opened(*arguments, **options)
        if arguments[1] == "wb":
            file.write(b"torn")
            file.flush()
            counted(lambda: file.seek(0))()
        return file

    for name in ("pipe_file", "mv", "rm_file"):
        setattr(store.files, name, counted(getattr(store.files, name)))
    opened, store.files.open = store.files.open, partly
    copy = Copy(path, all_files(rank, world_size))
    copy.upload(store)
    if rank == 0:
        publish(store, copy.manifest, directory, 0)
        prune(store, copy.manifest, 1)
    os._exit(0)

for number in range(kills):
    shutil.copytree(bucket, f"{bucket}{number}")
    child = os.fork()
    if child == 0:
        copy(number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status)
    if status == 0:
        break
"""


def killed(bucket: Path, path: Path, directory: Path, rank: int, world_size: int, kills: int) -> list[int]:
    """Copy as a rank of a run does, in processes that die before their first, second, ... change of the store.

    Each has its own copy of the bucket, BUCKET0, BUCKET1 and so on. Returns their exit statuses.
    """
    arguments = (*map(str, (bucket, path, directory, rank, world_size, kills)),)
    finished = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return [int(line) for line in finished.stdout.split()]


def test_a_kill_at_any_moment_leaves_the_previous_copy_or_the_new_one(tmp_path: Path, run: Path) -> None:
    """On a file system, where files grow visibly: nothing but the order of the writes protects a reader."""
    bucket = tmp_path / "bucket"
    copy_alone(Store(f"file://{bucket}/first"), saved(run, 2), run)
    previous, path = contents(run / "checkpoints" / "step_00000002"), saved(run, 4)
    statuses, seen = killed(bucket, path, run, 0, 1, 60), []
    for number, _ in enumerate(statuses):
        store, target = Store(f"file://{bucket}{number}/first"), tmp_path / f"pulled{number}"
        one, skipped = download_run(store, target)
        expected = {2: previous, 4: contents(path)}[one.step]
        assert not skipped
        assert contents(target / "checkpoints" / f"step_{one.step:08d}") == expected
        seen.append(one.step)
        prune(store, copy_alone(store, path, run), 1)  # the resumed run completes it
        assert [(left.step, left.visible) for left in stored(store)] == [(4, True)]
    assert statuses == (len(statuses) - 1) * [-signal.SIGKILL] + [0]
    assert seen == sorted(seen)
    assert seen.count(2) >= 2 + 2 * 3  # in two files; before the writing and the renaming of three small ones
    assert seen.count(4) == 4  # before the removal of three files, and at the end


def test_rank_0_publishes_nothing_if_another_rank_is_killed(tmp_path: Path, run: Path) -> None:
    store = Store(f"file://{tmp_path}/bucket/first")
    copy_alone(store, saved(run, 2), run)
    path = saved(run, 4)
    assert killed(tmp_path / "bucket", path, run, 1, 2, 1) == [-signal.SIGKILL]
    store = Store(f"file://{tmp_path}/bucket0/first")
    copy = Copy(path, all_files(0, 2))
    copy.upload(store)
    with pytest.raises(StoreError, match=r"another rank has not copied 'rank00001.safetensors'"):
        publish(store, copy.manifest, run, 0.1)
    assert steps(store) == [2]
    copy_alone(store, path, run)  # the resumed run completes the copy
    assert steps(store) == [2, 4]


# The extension.


def observed(directory: Path, step: int = 0, rank: int = 0, world_size: int = 1) -> Any:
    checkpoint = SimpleNamespace(keep=2)
    return SimpleNamespace(
        rank=rank, directory=directory, step=step, shared_folder=True, mesh=SimpleNamespace(world_size=world_size),
        config=SimpleNamespace(checkpoint=checkpoint), enter=[].append,
    )  # fmt: skip


def extension(store: Store, **options: Any) -> CopiesCheckpoints:
    address = store.address.rpartition("/")[0]
    return CopiesCheckpoints(CopiesCheckpoints.Config(address=address, **options))


def test_two_ranks_copy_their_files_and_keep_as_many_checkpoints_as_the_run(run: Path, store: Store) -> None:
    ranks = [(extension(store), observed(run, rank=rank, world_size=2)) for rank in range(2)]
    for plugin, its_run in ranks:
        plugin.run_started(its_run)
    for step in (1, 2, 3):
        path = saved(run, step)
        for plugin, its_run in reversed(ranks):
            plugin.checkpoint_saved(its_run, path)
    for plugin, its_run in reversed(ranks):
        plugin.run_finished(its_run)
    assert steps(store) == [2, 3]
    names = [{*one.sizes} for one in stored(store)]
    assert names == 2 * [{MANIFEST, "rank00000.safetensors", "rank00001.safetensors"}]


def test_a_resumed_run_copies_its_checkpoint_if_the_copy_was_not_completed(run: Path, store: Store) -> None:
    saved(run, 3)
    plugin = extension(store, keep=1)
    plugin.run_started(observed(run, step=3))
    plugin.run_finished(observed(run, step=3))
    assert steps(store) == [3]


def test_a_store_that_fails_later_is_reported_and_the_next_checkpoint_is_copied(
    run: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = extension(store)
    plugin.run_started(observed(run))

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("the bucket is full")

    with monkeypatch.context() as patched:
        patched.setattr(type(store.files), "open", refuse)
        plugin.checkpoint_saved(observed(run), saved(run, 1))
        plugin.worker._waiting.put(None)
        plugin.worker._thread.join()
    folder = f"{store.address}/checkpoints/step_00000001"
    error = capsys.readouterr().err
    assert error.startswith(f"mplug: step 1 is not in '{store.address}': cannot write '{folder}.")
    assert error.endswith("the bucket is full; the run continues, and copies its next checkpoint\n")
    plugin.run_started(observed(run))
    plugin.checkpoint_saved(observed(run), saved(run, 2))
    plugin.run_finished(observed(run))
    assert steps(store) == [2]


def test_the_end_of_a_run_waits_no_longer_than_stated(
    run: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = extension(store, wait_seconds=9, end_seconds=0.2)
    plugin.run_started(observed(run, world_size=2))
    plugin.checkpoint_saved(observed(run, world_size=2), saved(run, 1))
    plugin.run_finished(observed(run))
    assert capsys.readouterr().err == f"mplug: the last checkpoint is not in '{store.address}' after 0.2 s\n"


def test_the_copy_of_another_run_is_refused(run: Path, store: Store) -> None:
    extension(store).run_started(observed(run))
    other = run.parent.parent / "elsewhere" / "first"
    other.mkdir(parents=True)
    with pytest.raises(UsageError, match=f"'{store.address}' has the checkpoints of another run; use another address"):
        extension(store).run_started(observed(other))
    extension(store).run_started(observed(run))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("bucket/runs", "'bucket/runs' is no address of a store; use one such as s3://BUCKET/FOLDER"),
        ("s3://", "'s3://' is no address of a store"),
        ("s5://bucket/runs", "fsspec knows no protocol 's5' of 's5://bucket/runs'"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_before_the_run(address: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CopiesCheckpoints(CopiesCheckpoints.Config(address=address)).configure()


# Commands.


def test_pull_list_and_push(tmp_path: Path, run: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved(run, 5)
    pushed = CliRunner().invoke(command, ["push", store.address, "--name", "first"], catch_exceptions=False)
    assert pushed.output == f"'{store.address}/{stored(store)[0].folder}' has step 5 of 'runs/first'\n"
    listed = CliRunner().invoke(command, ["list", store.address], catch_exceptions=False)
    step, *_, address = listed.output.splitlines()[1].split()
    assert (step, address) == ("5", f"{store.address}/{stored(store)[0].folder}")
    pulled = CliRunner().invoke(command, ["pull", store.address, "--name", "again"], catch_exceptions=False)
    assert pulled.output == "run 'runs/again' has step 5; continue with: mplug train --resume --name again\n"
    assert contents(tmp_path / "runs" / "again" / "checkpoints" / path.name) == contents(path)
    (path / "rank00001.safetensors").unlink()  # a machine without it is completed
    pulled = CliRunner().invoke(command, ["pull", store.address], catch_exceptions=False)
    assert pulled.output == "run 'runs/first' has step 5; continue with: mplug train --resume --name first\n"
    assert contents(path) == contents(tmp_path / "runs" / "again" / "checkpoints" / path.name)
    (run / "store.json").write_text("{}")
    with pytest.raises(UsageError, match="'runs/first' exists already"):
        CliRunner().invoke(command, ["pull", store.address], catch_exceptions=False)
    with pytest.raises(UsageError, match="has no complete checkpoint"):
        CliRunner().invoke(command, ["list", f"{store.address}/none"], catch_exceptions=False)


# Folders and files.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MPLUG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_copied_once_until_it_changes(store: Store, cache: Path) -> None:
    store.write_whole("config.json", b"{}")
    store.write_whole("below/weights", b"1")
    first = Folders().local_copy(store.address)
    assert contents(first) == {"config.json": b"{}", "below/weights": b"1"}
    assert first.is_relative_to(cache)
    assert Folders().local_copy(store.address) == first
    store.write_whole("below/weights", b"22")
    second = Folders().local_copy(store.address)
    assert second != first
    assert (contents(first)["below/weights"], contents(second)["below/weights"]) == (b"1", b"22")


def test_one_file_has_its_own_name_in_the_cache(store: Store, cache: Path) -> None:
    store.write_whole("texts/a.jsonl", b"{}\n")
    copy = Folders().local_copy(f"{store.address}/texts/a.jsonl")
    assert copy.name == "a.jsonl"
    assert copy.read_bytes() == b"{}\n"


def test_of_a_run_only_its_newest_valid_checkpoint_is_copied(run: Path, store: Store, cache: Path) -> None:
    for step in (1, 2):
        copy_alone(store, saved(run, step), run)
    copy = Folders().local_copy(store.address)
    assert [path.name for path in (copy / "checkpoints").iterdir()] == ["step_00000002"]
    assert (copy / "config.yaml").is_file()


def test_a_delivered_folder_ends_with_the_file_by_which_it_is_recognised(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(name)
    written = []
    for method in ("write", "write_whole"):
        monkeypatch.setattr(Store, method, lambda *arguments: written.append(arguments[1]))
    Folders().deliver(folder, store.address)
    assert written == ["model.safetensors", "tokenizer.json", "config.json"]
    monkeypatch.undo()
    Folders().deliver(folder, store.address)
    assert {name: store.read(name) for name in store.sizes()} == {name: name.encode() for name in written}
    with pytest.raises(UsageError, match="exists already"):
        Folders().refuse_existing(store.address)


def test_an_address_without_anything_is_refused(store: Store, cache: Path) -> None:
    with pytest.raises(UsageError, match=f"there is nothing at '{store.address}'"):
        Folders().local_copy(store.address)
    assert os.listdir(cache.parent) == []
