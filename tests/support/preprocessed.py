"""Texts, jobs of `mplug data preprocess`, and the documents that they must write."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("psutil")
pytest.importorskip("zstandard")

from mplug_indexed.preprocess.job import Job
from mplug_indexed.preprocess.sources import find_sources

from mplug_tokenization import describe_tokenizer

EOD = 256
BYTES = describe_tokenizer("bytes", {})
DOCUMENTS = [f"document {number}: " + "Grüße 世界\n🌍 " * (number % 7) for number in range(120)]


def lines_of(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"id": n, "text": text}).encode() + b"\n" for n, text in enumerate(texts))


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def job(prefix: Path, *inputs: Path, form: str | None = None, pattern: str | None = None, **changes: Any) -> Job:
    wanted = {"tokenizer": BYTES, "append_eod": True, "chunk_size": 700, **changes}
    return Job(prefix, find_sources(map(str, inputs), form, pattern), **wanted)


def data_of(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def expected(texts: list[str], eod: bool = True) -> tuple[bytes, bytes]:
    """The files, written out by the format's own description."""
    tokens = [[*text.encode(), *([EOD] if eod else [])] for text in texts]
    lengths = [len(document) for document in tokens]
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) * 2
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(texts), len(texts) + 1)
    index += np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes()
    index += np.arange(len(texts) + 1, dtype="<i8").tobytes()
    return np.array([token for document in tokens for token in document], "<u2").tobytes(), index


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "tmp" in path.name or "part" in path.name)
