"""Copies of checkpoints that are interrupted, that fail, or that several ranks write."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fsspec")

from mplug_store import CopiesCheckpoints
from mplug_store.address import Store, StoreError
from mplug_store.checkpoints import MANIFEST, prune, stored
from mplug_store.download import download_run
from mplug_store.upload import Copy, all_files, copy_alone, publish
from stored_runs import contents, saved, steps

from mplug import UsageError

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
