"""Writes an indexed data set: its files get their names when they are complete and on the disk."""

import os
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mplug import UsageError, sync_file, sync_path
from mplug_indexed.failures import cannot_write
from mplug_indexed.format import CHUNK, CODES, HEADER, LONGEST, MAGIC, VERSION, bin_path, idx_path
from mplug_indexed.reader import Reader


class Writer:
    """Writes a data set; its files get their names only after `close` has both on the disk.

    As a context manager it closes, or after an exception removes what it wrote. An earlier data set of the same prefix
    stays until `close`, which removes its `.idx` first, so that no index is ever beside the tokens of another data set.
    Raises RunError if the disk is full or broken, UsageError if the place cannot be written.
    """

    def __init__(self, prefix: Path | str, dtype: DTypeLike) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        if self.dtype not in CODES.values():
            raise ValueError(f"the format does not support tokens of type {self.dtype}")
        self._lengths, self._bounds = array("i"), array("q", [0])
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            mark = f".{os.getpid():x}-{os.urandom(4).hex()}.tmp"
            self._bin, self._idx = (Path(f"{path}{mark}") for path in (bin_path(prefix), idx_path(prefix)))
            self._file = self._bin.open("xb", buffering=1 << 20)
        except OSError as error:
            raise cannot_write(bin_path(prefix), error) from None

    def add_documents(self, tokens: NDArray[Any], lengths: "Sequence[int] | NDArray[Any]") -> None:
        """Add documents of one sequence each: their concatenated tokens, and the length of each."""
        added = self._add(tokens, lengths)
        bounds = np.arange(len(self._lengths) - added + 1, len(self._lengths) + 1, dtype=np.int64)
        self._bounds.frombytes(bounds.tobytes())

    def add_document(self, tokens: NDArray[Any], lengths: "Sequence[int] | NDArray[Any]") -> None:
        """Add one document of several sequences, such as sentences."""
        self._add(tokens, lengths)
        self._bounds.append(len(self._lengths))

    def _add(self, tokens: NDArray[Any], lengths: "Sequence[int] | NDArray[Any]") -> int:
        tokens, counts = np.asarray(tokens).reshape(-1), np.asarray(lengths, dtype=np.int64).reshape(-1)
        if counts.sum() != len(tokens) or (counts < 0).any():
            raise ValueError(f"lengths add up to {counts.sum()} tokens, and there are {len(tokens)}")
        if counts.max(initial=0) > LONGEST:
            raise UsageError(f"a document has {counts.max()} tokens, and the format allows {LONGEST}; split it")
        self._write(_cast(tokens, self.dtype))
        self._lengths.frombytes(counts.astype(np.int32).tobytes())
        return len(counts)

    def _write(self, data: Any) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise cannot_write(bin_path(self.prefix), error) from None

    def append(self, other_prefix: Path | str) -> None:
        """Append all documents of another data set; raises UsageError if its dtype differs or if it has modes."""
        other = Reader(other_prefix)
        if other.dtype != self.dtype:
            raise UsageError(
                f"'{other_prefix}' has {other.dtype} tokens, and '{self.prefix}' has {self.dtype} tokens; preprocess "
                f"both with the same tokenizer"
            )
        if other.modes is not None:
            raise UsageError(
                f"'{other_prefix}' has modes (it is multimodal), and '{self.prefix}' would lose them; remove it"
            )
        other.verify()
        before = len(self._lengths)
        for piece in other.in_order():
            self._write(piece)
        for start in range(0, len(other), CHUNK):
            self._lengths.frombytes(other.lengths[start : start + CHUNK].tobytes())
        for start in range(1, len(other.document_indices), CHUNK):
            self._bounds.frombytes((other.document_indices[start : start + CHUNK] + before).tobytes())

    def close(self) -> None:
        """Flush both files to the disk, then rename them, `.idx` last."""
        if self._file.closed:
            return
        try:
            sync_file(self._file)
            self._file.close()
            with self._idx.open("xb", buffering=1 << 20) as file:
                file.writelines(self._index())
                sync_file(file)
            idx_path(self.prefix).unlink(missing_ok=True)
            self._bin.replace(bin_path(self.prefix))
            self._idx.replace(idx_path(self.prefix))
            sync_path(self.prefix.parent)
        except OSError as error:
            self.discard()
            raise cannot_write(bin_path(self.prefix), error) from None

    def discard(self) -> None:
        """Remove what has been written; an earlier data set of the same prefix stays."""
        with suppress(OSError):  # of a full disk: the file is removed anyway
            self._file.close()
        for path in (self._bin, self._idx):
            path.unlink(missing_ok=True)

    def _index(self) -> Iterable[bytes]:
        """The `.idx`, block by block: the pointers of 10^8 sequences at once would take 800 MB."""
        code = next(code for code, dtype in CODES.items() if dtype == self.dtype)
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        yield HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._bounds))
        yield lengths.astype("<i4", copy=False).tobytes()
        pointer = 0
        for start in range(0, len(lengths), CHUNK):
            sizes = lengths[start : start + CHUNK].astype("<i8") * self.dtype.itemsize
            ends = np.cumsum(sizes) + pointer
            yield (ends - sizes).tobytes()
            pointer = int(ends[-1])
        yield np.frombuffer(self._bounds, dtype=np.int64).astype("<i8", copy=False).tobytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _cast(tokens: NDArray[Any], dtype: "np.dtype[Any]") -> NDArray[Any]:
    """Tokens in the dtype of the file; raises UsageError if one does not fit."""
    if tokens.dtype != dtype and dtype.kind in "iu" and len(tokens):
        info = np.iinfo(dtype)
        for token in (tokens.min(), tokens.max()):
            if not info.min <= token <= info.max:
                raise UsageError(
                    f"token {token} does not fit into {dtype}; use the wider type that its vocabulary needs"
                )
    return np.ascontiguousarray(tokens, dtype=dtype)
