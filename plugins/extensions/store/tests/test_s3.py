"""The stores of S3, against a server on this machine: parts, refusals, and the way back."""

import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("fsspec", reason="the tests of S3 need fsspec")
pytest.importorskip("s3fs", reason="the tests of S3 need s3fs")
pytest.importorskip("moto", reason="the tests of S3 need moto")

import s3fs
from mplug_store import CopiesCheckpoints
from mplug_store.address import Store
from mplug_store.download import download_run, newest_first

from mplug import UsageError


@pytest.fixture(autouse=True)
def user(endpoint: str, bucket: str) -> Iterator[None]:
    """A user whom the server accepts, again after a test in which it has refused him."""
    yield
    accept(endpoint, "inf")


def accept(endpoint: str, requests: str) -> None:
    """Let the server accept so many further requests of a user that it does not know."""
    request = Request(f"{endpoint}/moto-api/reset-auth", requests.encode(), {"Content-Type": "text/plain"})
    with urlopen(request) as answer:
        assert json.loads(answer.read())["status"] == "ok"


def run_in(directory: Path, rank: int = 0, world_size: int = 1) -> Any:
    directory.mkdir(parents=True, exist_ok=True)
    return SimpleNamespace(
        rank=rank, directory=directory, step=0, shared_folder=True, mesh=SimpleNamespace(world_size=world_size),
        config=SimpleNamespace(checkpoint=SimpleNamespace(keep=1)), enter=[].append,
    )  # fmt: skip


def saved(directory: Path, step: int, ranks: int = 1) -> Path:
    path = directory / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    contents = {f"rank{rank:05d}.safetensors": b"%d of %d" % (rank, step) for rank in range(ranks)}
    for name, content in contents.items():
        (path / name).write_bytes(content)
    files = {name: {"bytes": len(one), "crc32": zlib.crc32(one)} for name, one in contents.items()}
    (path / "checkpoint.json").write_text(json.dumps({"step": step, "files": files}))
    return path


def extension(address: str, **options: Any) -> CopiesCheckpoints:
    return CopiesCheckpoints(CopiesCheckpoints.Config(address=address, **options))


def test_two_ranks_copy_to_s3_and_the_run_comes_back(tmp_path: Path) -> None:
    directory = tmp_path / "first"
    ranks = [(extension("s3://bucket/two"), run_in(directory, rank, 2)) for rank in range(2)]
    for plugin, run in ranks:
        plugin.run_started(run)
    for step in (1, 2):
        path = saved(directory, step, ranks=2)
        for plugin, run in ranks:
            plugin.checkpoint_saved(run, path)
    for plugin, run in reversed(ranks):
        plugin.run_finished(run)
    store = Store("s3://bucket/two/first")
    assert [one.step for one in newest_first(store)] == [2]
    download_run(store, tmp_path / "again")
    for file in path.iterdir():
        assert (tmp_path / "again" / "checkpoints" / path.name / file.name).read_bytes() == file.read_bytes()


def test_a_file_of_several_parts_is_visible_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mplug_store.address.PART", 5 << 20)  # the smallest part of S3
    store, content, seen = Store("s3://bucket/parts"), bytes(range(256)) * (11 << 12), []

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            seen.append(store.sizes())
            return super().read(size)

    assert store.write("file", Watched(content)) == zlib.crc32(content)
    assert len(seen) == 4
    assert not any(seen)
    assert store.sizes() == {"file": len(content)}
    copied = io.BytesIO()
    assert store.copy_to("file", copied) == zlib.crc32(content)
    assert copied.getvalue() == content


def test_an_absent_bucket_and_a_refused_user_end_the_run_at_its_start(tmp_path: Path, endpoint: str) -> None:
    reason = (
        r"extensions.store.address: cannot write 's3://absent/runs/first/store.json': The specified bucket does not"
    )
    with pytest.raises(UsageError, match=reason):
        extension("s3://absent/runs").run_started(run_in(tmp_path / "first"))
    assert not s3fs.S3FileSystem().exists("absent"), "it is not created"
    accept(endpoint, "0")
    with pytest.raises(UsageError, match=r"cannot read 's3://bucket/refused/first/store.json': Forbidden"):
        extension("s3://bucket/refused").run_started(run_in(tmp_path / "first"))


def test_a_user_who_is_refused_later_gets_one_sentence_and_the_next_checkpoint_is_copied(
    tmp_path: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "first")
    plugin = extension("s3://bucket/later")
    plugin.run_started(run)
    accept(endpoint, "0")
    plugin.checkpoint_saved(run, saved(run.directory, 1))
    while "not in" not in (error := capsys.readouterr().err):
        assert plugin.worker is not None
        plugin.worker._thread.join(0.05)
    assert error.startswith("mplug: step 1 is not in 's3://bucket/later/first': cannot list 's3://bucket/later/first/")
    assert error.endswith("in our records.; the run continues, and copies its next checkpoint\n")
    accept(endpoint, "inf")
    plugin.checkpoint_saved(run, saved(run.directory, 2))
    plugin.run_finished(run)
    assert [one.step for one in newest_first(Store("s3://bucket/later/first"))] == [2]
