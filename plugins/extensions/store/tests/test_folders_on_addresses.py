"""Folders and files at addresses: copied once, listed and delivered."""

import os
from pathlib import Path

import pytest

pytest.importorskip("fsspec")

from click.testing import CliRunner
from mplug_store import CopiesCheckpoints
from mplug_store.address import Store
from mplug_store.checkpoints import stored
from mplug_store.command import command
from mplug_store.folders import Folders
from mplug_store.upload import copy_alone
from stored_runs import contents, saved

from mplug import UsageError


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
