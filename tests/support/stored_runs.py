"""A run's folder, its checkpoints, and the observer that copies them."""

import json
import zlib
from pathlib import Path

import pytest

pytest.importorskip("fsspec")

from mplug_store.address import Store
from mplug_store.checkpoints import MANIFEST
from mplug_store.download import newest_first


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
