"""What one process does: the texts of a chunk become a part, which is whole on the disk or not there."""

import json
import os
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mplug import TokenizerRecord, UsageError, load_tokenizer
from mplug_indexed.files import Reader, Writer, write_text
from mplug_indexed.preprocess.documents import Bad, Texts
from mplug_indexed.preprocess.report import SavedPart
from mplug_indexed.preprocess.sources import Chunk

if TYPE_CHECKING:
    from mplug import CorpusTokenizer

BATCH = 1 << 18
"""Characters that are encoded at once: enough for a library to be quick, little enough to stay in a cache."""


@dataclass(frozen=True)
class Work:
    """What is the same for all chunks."""

    folder: str
    key: str
    append_eod: bool
    dtype: str
    tokenizer: TokenizerRecord


@dataclass
class Part:
    """What a chunk has become. Line numbers of `bad` count from the chunk's first."""

    documents: int = 0
    tokens: int = 0
    lines: int = 0
    empty: int = 0
    num_bad: int = 0
    bad: list[Bad] = field(default_factory=list)


def part_prefix(folder: str | Path, number: int) -> Path:
    """The part of a chunk is `NUMBER.bin`, `NUMBER.idx` and, once it is whole, `NUMBER.json`."""
    return Path(folder) / f"{number:08}"


def read_part(folder: str | Path, number: int) -> Part | None:
    """What is known of a part that is whole; None where it is not, or not any more."""
    prefix = part_prefix(folder, number)
    try:
        saved = SavedPart.model_validate_json(Path(f"{prefix}.json").read_bytes())
        part = Part(**{**saved.model_dump(), "bad": [Bad(**bad.model_dump()) for bad in saved.bad]})
        reader = Reader(prefix)
    except (OSError, ValueError, UsageError):  # whatever a damaged part holds
        return None
    return part if (len(reader), len(reader.tokens)) == (part.documents, part.tokens) else None


class Encoder:
    """Makes parts, with one tokenizer that is built once."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.tokenizer: CorpusTokenizer = load_tokenizer(work.tokenizer)
        self.eod = work.tokenizer.eod if work.append_eod else None

    def encode(self, chunk: Chunk) -> Part:
        """Make the part of a chunk. UsageError and RunError say what is wrong with the input, or with the disk."""
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
        """All tokens of some texts in a row, and how many each has; the end of a document is counted."""
        found = self.tokenizer.encode_batch(texts)
        if len(found) != len(texts):
            raise UsageError(f"tokenizer '{self.work.tokenizer.name}' encodes {len(texts)} texts as {len(found)}")
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
                f"tokenizer '{self.work.tokenizer.name}' gives token {wrong}, and its vocabulary has {size}; its files "
                f"do not belong together"
            )


def _batches(texts: Texts, part: Part) -> "Any":
    """The texts in batches of about as many characters; those that are empty are counted, and left out."""
    batch, held = list[str](), 0
    for text in texts:
        if not text:
            part.empty += 1
            continue
        batch.append(text)
        held += len(text)
        if held >= BATCH:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def write_json(path: Path, data: Any) -> None:
    """Write a small file so that it is either whole or not there."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False))


# In a process of a pool.

_encoder: Encoder | None = None


def start_worker(work: Work) -> None:
    """Build the tokenizer, and end with the process that started this one, however that ends."""
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
    """Make a part, in a worker."""
    assert _encoder is not None
    return _encoder.encode(chunk)
