"""Data and published folders at addresses of a store: what is read equals what is read from the disk."""

import io
import json
import tarfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec", reason="addresses need fsspec")
pytest.importorskip("s3fs", reason="the tests of S3 need s3fs")

from mplug_store.folders import Folders

from mplug import UsageError
from mplug.run.prepare import check_data
from mplug_testing.harness import tiny_run

TEXTS = [f"{number} bottles of beer on the wall, {number} bottles of beer" for number in range(60)]


def text(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    (folder / "songs.txt").write_text("\n".join(TEXTS))
    return {"path": ""}


def packed(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    lines = [json.dumps({"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "yes"}]})
             for one in TEXTS]  # fmt: skip
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return {"path": "", "max_documents": 8}


def datasets(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    for part in ("train", "test"):
        (folder / f"{part}.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in TEXTS))
    return {"path": "", "validation_split": "test"}


def indexed(folder: Path) -> dict[str, Any]:
    """Two data sets in one folder, of which one is named."""
    import numpy as np
    from mplug_indexed.writer import Writer

    folder.mkdir()
    for name in ("songs", "songs2"):
        with Writer(folder / name, np.dtype(np.uint16)) as writer:
            for one in TEXTS:
                tokens = np.frombuffer(one.encode(), np.uint8).astype(np.uint16)
                writer.add_document(tokens, [len(tokens)])
    return {"path": "/songs", "vocab_size": 256}


def energon(folder: Path) -> dict[str, Any]:
    from megatron.energon.tools.prepare import command

    folder.mkdir()
    for part in ("train", "val"):
        with tarfile.open(folder / f"{part}-0.tar", "w") as tar:
            for number, one in enumerate(TEXTS):
                info = tarfile.TarInfo(f"{part}{number:03}.txt")
                info.size = len(one)
                tar.addfile(info, io.BytesIO(one.encode()))
    words = ["--non-interactive", "--no-progress", "--num-workers=1", "--sample-type=TextSample"]
    parts = [f"--split-parts={part}:{part}-.*" for part in ("train", "val")]
    command.main([str(folder), *words, *parts, '--field-map={"text": "txt"}'], standalone_mode=False)
    return {"path": "", "streams": 1}


def samples(name: str, data: dict[str, Any], base: str) -> list[dict[str, Any]]:
    """The first micro batches of a run of one process."""
    settings = {f"data.{field}": value for field, value in {**data, "path": f"{base}{data['path']}"}.items()}
    run = tiny_run({**settings, "data.name": name, "trainer.eval_every": 0, "trainer.seq_length": 128})
    check_data(run)
    loader = run.hooks.call.build_loader(run=run, split="train")
    return [{key: one.tolist() for key, one in batch.items()} for batch in islice(loader.take(8), 4)]


WIDE = [pytest.param(make, marks=pytest.mark.wide("data")) for make in (text, packed, datasets, energon)]


@pytest.mark.parametrize("make", [indexed, *WIDE])
def test_a_loader_reads_from_an_address_what_it_reads_from_a_folder(make: Any, tmp_path: Path, bucket: str) -> None:
    if make in (datasets, energon):
        pytest.importorskip("datasets" if make is datasets else "megatron.energon")
    data = make(tmp_path / "data")
    address = f"{bucket}/{make.__name__}"
    Folders().deliver(tmp_path / "data", address)
    expected = samples(make.__name__, data, str(tmp_path / "data"))
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            path.unlink()  # what follows does not read it
    assert samples(make.__name__, data, address) == expected
    assert len(expected) > 0


def test_only_the_files_of_one_data_set_of_a_folder_are_copied(tmp_path: Path, bucket: str) -> None:
    from mplug import local_prefix

    indexed(tmp_path / "data")
    Folders().deliver(tmp_path / "data", f"{bucket}/sets")
    prefix = local_prefix(f"{bucket}/sets/songs")
    assert prefix.name == "songs"
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["songs.bin", "songs.idx"]
    with pytest.raises(UsageError, match=r"there is nothing at 's3://bucket/sets/song.\*'"):
        local_prefix(f"{bucket}/sets/song")
    with pytest.raises(UsageError, match=r"'s3://bucket/sets/' names no files; use the address of files without"):
        local_prefix(f"{bucket}/sets/")
