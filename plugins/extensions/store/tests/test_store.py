"""Copies of checkpoints in a store: what is visible at every moment, also after a kill, and what a store refuses."""

from pathlib import Path

import pytest

pytest.importorskip("fsspec")

from mplug_store.address import Store, StoreError
from mplug_store.checkpoints import prune, stored
from mplug_store.download import download_run
from mplug_store.upload import Copy, all_files, copy_alone, publish
from stored_runs import contents, saved, steps

from mplug import RunError, UsageError
from mplug_testing import ExtensionSuite


@pytest.mark.wide("loggers")
class TestCopiesCheckpoints(ExtensionSuite):
    plugin = "store"
    settings = {"extensions.store.address": "memory://suite"}
    files = ("store.json",)
    checks_fields = False  # the tests below check each field: what they change is in the store


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
