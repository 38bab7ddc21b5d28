"""Reads the texts of a chunk, and reports the lines without a valid text."""

import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mplug import RunError, UsageError
from mplug_indexed.preprocess.parquet import open_parquet, words_of
from mplug_indexed.preprocess.sources import Chunk, Source

BOM = b"\xef\xbb\xbf"
MOST_BAD = 1000
"""Maximum number of bad lines reported per chunk; further ones are only counted."""
PACKED = 1 << 14
"""Compressed bytes unpacked at once; the result is held in memory and may be many times larger."""
SHOWN = 6
"""Maximum number of fields that the error for a missing field names."""


@dataclass(frozen=True)
class Bad:
    """A bad document: its file, its line (or row) in the chunk, and the reason."""

    path: str
    line: int
    reason: str


class Texts:
    """Iterates over the texts of a chunk and updates `lines` and `bad`. Lines count from the chunk's first."""

    def __init__(self, chunk: Chunk, key: str) -> None:
        self.chunk, self.key = chunk, key
        self.lines = self.num_bad = 0
        self.bad: list[Bad] = []

    def __iter__(self) -> Iterator[str]:
        """Each valid text; bad lines are added to `bad`."""
        read = {"jsonl": self._json_lines, "parquet": self._rows, "text": self._files}
        return read[self.chunk.source.format]()

    def _note(self, reason: str, path: str | None = None) -> None:
        self.num_bad += 1
        if len(self.bad) < MOST_BAD:
            self.bad.append(Bad(path or self.chunk.source.path, self.lines, reason))

    def _json_lines(self) -> Iterator[str]:
        from orjson import loads

        key = self.key
        for line in _lines(self.chunk):
            self.lines += 1
            try:
                text = loads(line)[key]
            except (ValueError, KeyError, TypeError):
                text = None
            if type(text) is not str:
                text = self._second_look(line)
            if text is not None:
                yield text

    def _second_look(self, line: bytes) -> str | None:
        """The slow path for a line in which the fast parser finds no text: blank, with NaN (not JSON), or bad."""
        line = line.removeprefix(BOM) if self.lines == 1 and self.chunk.start == 0 else line
        if not line.strip():
            return None
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError as error:
            self._note(f"is not valid UTF-8 at byte {error.start + 1}")
            return None
        except json.JSONDecodeError as error:
            self._note(f"is not valid JSON: {error.msg} at character {error.pos + 1}")
            return None
        except (ValueError, RecursionError) as error:
            self._note(f"cannot be parsed as JSON: {error}")
            return None
        if not isinstance(record, dict):
            self._note(f"is {_kind(record)}; it must be an object with a field '{self.key}'")
        elif self.key not in record:
            fields = [*map(str, record)][:SHOWN]
            self._note(f"has no field '{self.key}' (it has {', '.join(fields) or 'none'}); set --key to a field")
        else:
            text = record[self.key]
            if not isinstance(text, str):
                self._note(f"has {_kind(text)} in field '{self.key}', which must be a string")
            elif not _is_unicode(text):
                self._note(f"has an unpaired surrogate in field '{self.key}'")
            else:
                return text
        return None

    def _rows(self) -> Iterator[str]:
        chunk = self.chunk
        with open_parquet(chunk.source.path) as table, _readable(chunk.source):
            names = table.schema_arrow.names
            if self.key not in names:
                raise UsageError(
                    f"'{chunk.source.path}' has no column '{self.key}' (it has {', '.join(names)}); set --key"
                )
            for batch in table.iter_batches(1024, row_groups=range(chunk.start, chunk.stop), columns=[self.key]):
                for text in _values(batch.column(0)):
                    self.lines += 1
                    if isinstance(text, str):
                        yield text
                    elif isinstance(text, UnicodeDecodeError):
                        self._note(f"is not valid UTF-8 at byte {text.start + 1} of column '{self.key}'")
                    else:
                        self._note(f"has {_kind(text)} in column '{self.key}', which must be a string")

    def _files(self) -> Iterator[str]:
        for source in self.chunk.sources:
            self.lines = 1
            try:
                with _opened(source) as file, _readable(source):
                    text = file.read().removeprefix(BOM).decode()
            except UnicodeDecodeError as error:
                self._note(f"is not valid UTF-8 at byte {error.start + 1}", source.path)
            else:
                yield text


def _values(column: Any) -> "list[Any]":
    """The values of a column; a value that is not valid UTF-8 becomes the error of reading it."""
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


def _lines(chunk: Chunk) -> Iterator[bytes]:
    """The lines that begin in a chunk; the last one may end after it."""
    source = chunk.source
    with _opened(source) as file, _readable(source):
        if source.compression:
            yield from file
            return
        remaining = chunk.stop - chunk.start
        if chunk.start > 0:
            file.seek(chunk.start - 1)
            remaining -= len(file.readline()) - 1  # skip the rest of a line that began before the chunk
        if remaining > 0:
            block = file.read(remaining)
            if not block.endswith(b"\n"):
                block += file.readline()
            lines = block.split(b"\n")
            if not lines[-1]:
                lines.pop()
            yield from lines


@contextmanager
def _opened(source: Source) -> Iterator[BinaryIO]:
    if source.compression and not source.size:
        raise UsageError(f"'{source.path}' is damaged or truncated: a compressed file is not empty; download it again")
    try:
        if source.compression == ".gz":
            with gzip.open(source.path, "rb") as unpacked:
                yield unpacked  # type: ignore[misc]
        elif source.compression == ".zst":
            with Path(source.path).open("rb") as packed, io.BufferedReader(_Frames(packed), 1 << 20) as unpacked:
                yield unpacked
        else:
            with Path(source.path).open("rb") as file:
                yield file
    except FileNotFoundError:
        raise UsageError(
            f"'{source.path}' was removed during the work; restore it, or start again without it"
        ) from None


class _Frames(io.RawIOBase):
    """The content of consecutive Zstandard frames. Raises EOFError if the last one is truncated.

    zstandard's own `stream_reader` mistakes truncation for the end.
    """

    def __init__(self, packed: BinaryIO) -> None:
        from zstandard import ZstdDecompressor

        self._packed, self._unpacked = packed, memoryview(b"")
        self._begin = ZstdDecompressor().decompressobj
        self._frame: Any = None

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill a part of the target; returns its size, 0 at the end."""
        while not self._unpacked:
            unused = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            data = unused or self._packed.read(PACKED)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("its last frame is incomplete")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._begin()
            self._unpacked = memoryview(self._frame.decompress(data))
        count = min(len(target), len(self._unpacked))
        target[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    """Within this context, turn the errors of a damaged file into errors with one sentence."""
    damage: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile)
    if source.compression == ".gz":
        import zlib

        damage = (*damage, zlib.error)
    elif source.compression == ".zst":
        from zstandard import ZstdError

        damage = (*damage, ZstdError)
    elif source.format == "parquet":
        from pyarrow import ArrowException

        damage = (*damage, ArrowException)
    try:
        yield
    except damage as error:
        raise UsageError(f"'{source.path}' is damaged or truncated: {words_of(error)}; download it again") from None
    except OSError as error:
        if error.errno is None:  # from pyarrow, for data that it cannot decompress
            raise UsageError(f"'{source.path}' is damaged or truncated: {words_of(error)}; download it again") from None
        raise RunError(f"cannot read '{source.path}': {error.strerror}; run the same command again") from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    names |= {str: "a string", bytes: "bytes"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
