"""The encoded rows of a split in an Arrow file, which is written once per file system and then mapped."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock
from numpy.typing import NDArray

from mplug import RunError, UsageError
from mplug_datasets.rows import Pair, Tally
from mplug_tokenization.conversations import Count

VERSION = 1
"""Changes with the layout of the file and with the way in which rows are encoded."""
TOKENS = 1 << 20
"""A record batch has at least this number of tokens, except the last."""


class Store:
    """Encoded documents by their number; their tokens stay on the disk until they are read."""

    def __init__(self, batches: list[pa.RecordBatch], fingerprint: str) -> None:
        self._tokens = [_arrays(batch.column("tokens")) for batch in batches]
        has_labels = [bool(batch.schema.get_all_field_indices("labels")) for batch in batches]
        self._labels = [
            _arrays(batch.column("labels")) if has else None for batch, has in zip(batches, has_labels, strict=True)
        ]
        self._firsts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        lengths = [np.diff(offsets).astype(np.int64) for offsets, _ in self._tokens]
        self.lengths: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *lengths])
        self.digest = fingerprint

    @property
    def fingerprint(self) -> bytes:
        """A digest of all tokens and labels, computed when they were written."""
        return bytes.fromhex(self.digest)

    def read(self, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(tokens, labels) of a document; without labels, the labels are empty."""
        batch = int(np.searchsorted(self._firsts, number, side="right")) - 1
        place, labels = number - self._firsts[batch], self._labels[batch]
        return _part(self._tokens[batch], place), _part(labels, place) if labels else np.empty(0, np.int64)


def _arrays(column: pa.ListArray) -> tuple[NDArray[Any], NDArray[Any]]:
    return column.offsets.to_numpy(), column.values.to_numpy()


def _part(arrays: tuple[NDArray[Any], NDArray[Any]], place: int) -> NDArray[Any]:
    offsets, values = arrays
    return values[offsets[place] : offsets[place + 1]]


def cache_folder(given: str | None) -> Path:
    """The folder for encoded rows; raises UsageError if it cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given).expanduser() if given else cache / "mplug" / "datasets"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"data.cache '{folder}' cannot be written: {error.strerror}; set data.cache") from None
    if not os.access(folder, os.W_OK):
        raise UsageError(f"data.cache '{folder}' cannot be written; set data.cache to another folder")
    return folder


def open_store(folder: Path, key: str, documents: "Iterator[Pair]", tally: Tally) -> tuple[Store, Tally]:
    """The store of a key, and the counts of its rows. The first process that locks the key writes it.

    `documents` counts in `tally` while it is read.
    """
    data, notes = folder / f"{key}.arrow", folder / f"{key}.json"
    try:
        with FileLock(folder / f"{key}.lock"):
            if not data.is_file():
                digest = _write(data, documents)
                _replace(notes, json.dumps({"tally": asdict(tally), "fingerprint": digest}).encode())
                os.replace(f"{data}.part", data)
        saved = json.loads(notes.read_text())
        with pa.memory_map(str(data)) as file:
            batches = list(pa.ipc.open_stream(file))
    except (OSError, pa.ArrowInvalid, ValueError) as error:
        raise RunError(
            f"cannot write or read the encoded rows '{data}': {error}; make room, or remove the file, or set data.cache"
        ) from None
    found = saved["tally"]
    return Store(batches, saved["fingerprint"]), Tally(**{**found, "count": Count(**found["count"])})


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)


def _write(data: Path, documents: "Iterator[Pair]") -> str:
    """Write documents to the file's temporary name; returns a digest of them."""
    digest, writer = blake2b(digest_size=16), None
    with open(f"{data}.part", "wb") as file:
        for pairs in _batches(documents):
            columns = {"tokens": [tokens for tokens, _ in pairs]}
            if pairs and len(pairs[0][1]):
                columns["labels"] = [labels.astype(np.int32) for _, labels in pairs]
            lists = {name: _list(parts, digest) for name, parts in columns.items()}
            batch = pa.RecordBatch.from_arrays(list(lists.values()), names=list(lists))
            writer = writer or pa.ipc.new_stream(file, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _list(parts: list[NDArray[Any]], digest: Any) -> pa.ListArray:
    values = np.concatenate([np.empty(0, np.int32), *parts])
    offsets = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    for array in (offsets, values):
        digest.update(array.data)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _batches(documents: "Iterator[Pair]") -> "Iterator[list[Pair]]":
    """Documents in groups of TOKENS tokens; one empty group if there is none, so that the file has its columns."""
    group, size, any_group = list[Pair](), 0, False
    for pair in documents:
        group.append(pair)
        size += len(pair[0])
        if size >= TOKENS:
            yield group
            group, size, any_group = [], 0, True
    if group or not any_group:
        yield group


def key_of(files: Sequence[str], settings: object) -> str:
    """The name of encoded rows: a hash of the files (path, size, time of change) and of all settings."""
    states = [(file, (found := os.stat(file)).st_size, found.st_mtime_ns) for file in files]
    return blake2b(repr((VERSION, states, settings)).encode(), digest_size=16).hexdigest()
