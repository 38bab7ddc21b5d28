"""The work of one process: encode the texts of a chunk into a part, which is on disk completely or not at all."""

import json
import os
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mplug import UsageError
from mplug_indexed.failures import write_text
from mplug_indexed.preprocess.documents import Bad, Texts
from mplug_indexed.preprocess.report import SavedPart
from mplug_indexed.preprocess.sources import Chunk
from mplug_indexed.reader import Reader
from mplug_indexed.writer import Writer
from mplug_tokenization import TokenizerRecord, load_tokenizer

if TYPE_CHECKING:
    from mplug_tokenization import CorpusTokenizer

BATCH = 1 << 18
"""Characters encoded at once: enough for a library to be fast, few enough to stay in a cache."""


@dataclass(frozen=True)
class Work:
    """The settings that all chunks share."""

    folder: str
    key: str
    append_eod: bool
    dtype: str
    tokenizer: TokenizerRecord


@dataclass
class Part:
    """The counts of an encoded chunk. Line numbers of `bad` count from the chunk's first."""

    documents: int = 0
    tokens: int = 0
    lines: int = 0
    empty: int = 0
    num_bad: int = 0
    bad: list[Bad] = field(default_factory=list)


def part_prefix(folder: str | Path, number: int) -> Path:
    """The prefix of a chunk's part: `NUMBER.bin`, `NUMBER.idx` and, once it is complete, `NUMBER.json`."""
    return Path(folder) / f"{number:08}"


def read_part(folder: str | Path, number: int) -> Part | None:
    """The record of a complete part; None if it is missing, incomplete or damaged."""
    prefix = part_prefix(folder, number)
    try:
        saved = SavedPart.model_validate_json(Path(f"{prefix}.json").read_bytes())
        part = Part(**{**saved.model_dump(), "bad": [Bad(**bad.model_dump()) for bad in saved.bad]})
        reader = Reader(prefix)
    except (OSError, ValueError, UsageError):  # a missing or damaged part
        return None
    return part if (len(reader), len(reader.tokens)) == (part.documents, part.tokens) else None


class Encoder:
    """Encodes chunks into parts, with a tokenizer that is built once."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.tokenizer: CorpusTokenizer = load_tokenizer(work.tokenizer)
        self.eod = work.tokenizer.eod if work.append_eod else None

    def encode(self, chunk: Chunk) -> Part:
        """Make the part of a chunk. Raises UsageError for wrong input, RunError for a failed disk."""
        texts, part = Texts(chunk, self.work.key), Part()
        prefix = part_prefix(self.work.folder, chunk.number)
        with Writer(prefix, np.dtype(self.work.dtype)) as writer:
            for batch in _batches(texts, part):
                tokens, lengths = self._tokens(batch)
                writer.add_documents(tokens, lengths)
                part.documents += len(lengths)
                part.tokens += len(tokens)
        part.lines, part.num_bad, part.bad = texts.lines, texts.num_bad, texts.bad
        write_json(Path(f"{prefix}.json"), asdict(part))
        return part

    def _tokens(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """(concatenated tokens of some texts, number of tokens of each), including ends of documents."""
        found = self.tokenizer.encode_batch(texts)
        if len(found) != len(texts):
            raise UsageError(
                f"tokenizer '{self.work.tokenizer.name}' returns {len(found)} lists of tokens for {len(texts)} texts; "
                f"correct its encode_batch"
            )
        lengths = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
        total = int(lengths.sum())
        if found and isinstance(found[0], np.ndarray):
            tokens = np.concatenate(found) if total else np.empty(0, dtype=np.int64)
        else:
            tokens = np.fromiter(chain.from_iterable(found), dtype=np.int64, count=total)
        self._check(tokens)
        if self.eod is not None:
            wide = tokens if np.iinfo(tokens.dtype).max >= self.eod else tokens.astype(np.int64)
            tokens = np.insert(wide, np.cumsum(lengths), self.eod)
            lengths += 1
        return tokens, lengths

    def _check(self, tokens: NDArray[Any]) -> None:
        size = self.work.tokenizer.vocab_size
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
            wrong = int(tokens.max()) if tokens.max() >= size else int(tokens.min())
            raise UsageError(
                f"tokenizer '{self.work.tokenizer.name}' returns token {wrong}, and its vocabulary has {size} tokens; "
                f"use files that belong together"
            )


def _batches(texts: Texts, part: Part) -> "Any":
    """The texts in batches of about BATCH characters; empty texts are counted and omitted."""
    batch, characters = list[str](), 0
    for text in texts:
        if not text:
            part.empty += 1
            continue
        batch.append(text)
        characters += len(text)
        if characters >= BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def write_json(path: Path, data: Any) -> None:
    """Write a small JSON file atomically."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False))


# Functions that run in a process of the pool.

_encoder: Encoder | None = None


def start_worker(work: Work) -> None:
    """Build the tokenizer, and end this process when its parent ends, for any reason."""
    global _encoder
    import threading
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    _encoder = Encoder(work)


def encode_chunk(chunk: Chunk) -> Part:
    """Make a part in a worker process."""
    assert _encoder is not None
    return _encoder.encode(chunk)
