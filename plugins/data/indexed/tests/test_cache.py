"""The cache: an entry is made once, found again, and made anew when it is damaged."""

import fcntl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import flip_bit
from mplug_indexed.cache import Arrays, Cache, choose_folder, digest

from mplug import RunError, UsageError
from mplug_testing import run_workers


class Making:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Arrays:
        self.times += 1
        return {"small": np.arange(3, dtype=np.uint32), "large": np.arange(10_000, dtype=np.int64).reshape(-1, 2)}


def check(found: Arrays) -> None:
    for name, expected in Making()().items():
        np.testing.assert_array_equal(found[name], expected)
        assert found[name].dtype == expected.dtype


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def test_an_entry_is_made_once_and_then_read(tmp_path: Path) -> None:
    make = Making()
    for description in ({"of": 1, "b": [2]}, {"b": [2], "of": 1}, {"of": 1, "b": [2]}):
        check(Cache(tmp_path).get(description, make))
    assert make.times == 1
    check(Cache(tmp_path).get({"of": 2}, make))
    assert make.times == 2


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def described(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


OF_ONE = '{"description": {"of": 1}, "checksums": %s}'


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((f"{name}.npy", damage) for name in ("small", "large") for damage in (flip_bit, cut_off, Path.unlink)),
        *(("entry.json", damage) for damage in (flip_bit, cut_off, Path.unlink)),
        *(("entry.json", described(text)) for text in ("", "[]", "null", "{}")),
        *(("entry.json", described(OF_ONE % text)) for text in ("1", "{}", '{"small": null}')),
    ],
)
def test_a_damaged_entry_is_made_again(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    make = Making()
    Cache(tmp_path).get({"of": 1}, make)
    whole = files(tmp_path)
    damage(next(path for path in whole if path.name == name))
    check(Cache(tmp_path).get({"of": 1}, make))
    assert make.times == 2
    assert files(tmp_path) == whole


def test_an_interrupted_entry_is_made_again(tmp_path: Path) -> None:
    def dies() -> Arrays:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Cache(tmp_path).get({"of": 1}, dies)
    make = Making()
    check(Cache(tmp_path).get({"of": 1}, make))
    assert make.times == 1


def test_a_disk_that_fills_while_an_entry_is_written_leaves_no_entry(small_disk: Path) -> None:
    large = {"large": np.zeros(1 << 20)}
    with pytest.raises(RunError, match=r"cannot write '.*': No space left on device; .* set data\.cache"):
        Cache(small_disk).get({"of": 1}, lambda: large)
    assert not files(small_disk)


def slowly(folder: str) -> bool:
    """In a process of its own: get an entry that takes long; whether this process has made it."""
    make = Making()

    def wait_and_make() -> Arrays:
        time.sleep(0.3)
        return make()

    check(Cache(Path(folder)).get({"of": 1}, wait_and_make))
    return make.times == 1


def test_one_of_many_processes_makes_an_entry(tmp_path: Path) -> None:
    assert sorted(run_workers(3, slowly, str(tmp_path))) == [False, False, True]


def test_without_file_locks_every_process_gets_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*args: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    inner, outer = Making(), Making()

    def meanwhile() -> Arrays:
        """Another process is quicker."""
        check(Cache(tmp_path).get({"of": 1}, inner))
        return outer()

    check(Cache(tmp_path).get({"of": 1}, meanwhile))
    assert (inner.times, outer.times) == (1, 1)
    assert len(files(tmp_path)) == 3


def test_entries_are_next_to_the_data_or_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert choose_folder(None, tmp_path / "corpus") == tmp_path / "index-cache"
    (tmp_path / "index-cache").rmdir()
    (tmp_path / "index-cache").write_text("in the way")
    assert choose_folder(None, tmp_path / "corpus") == tmp_path / "home" / "mplug" / "indexed"
    assert choose_folder(str(tmp_path / "own"), tmp_path / "corpus") == tmp_path / "own"
    with pytest.raises(UsageError, match=r"data\.cache '.*index-cache' cannot be written: File exists"):
        choose_folder(str(tmp_path / "index-cache"), tmp_path / "corpus")
    (tmp_path / "home" / "mplug" / "indexed").rmdir()
    (tmp_path / "home" / "mplug" / "indexed").write_text("in the way, too")
    with pytest.raises(UsageError, match=r"the cache of indices cannot be written to .* or .*; set data\.cache"):
        choose_folder(None, tmp_path / "corpus")


def test_a_digest_covers_all_bytes() -> None:
    array = np.arange(5_000_000, dtype=np.int32)
    before = digest(array)
    array[-1] += 1
    assert digest(array) != before
    assert digest(array[:0]) == digest(np.empty(0, dtype=np.int64))
