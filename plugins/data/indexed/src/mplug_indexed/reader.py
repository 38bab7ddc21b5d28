"""Reads an indexed data set, memory-mapped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mplug import UsageError
from mplug_indexed.format import CHUNK, HEADER, bin_path, idx_path, parse_header
from mplug_indexed.overlaps import refuse_overlaps

NAMED = 5
"""Maximum number of other data sets that the error for a missing one names."""


class Reader:
    """A memory-mapped data set. Opening it reads the header and checks sizes; no header value causes an allocation.

    `lengths` i32[S], `pointers` i64[S] in bytes, `document_indices` i64[D], `modes` i8[S] or None, `tokens` of `dtype`:
    all of the `.bin`, in file order. Raises UsageError if the pair is incomplete; `verify` checks every entry.
    """

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = Path(prefix)
        index, data = idx_path(prefix), bin_path(prefix)
        size, data_size = _size(index), _size(data)
        self.dtype, num_sequences, num_bounds, has_modes = parse_header(_first_bytes(index), size, index)
        if data_size % self.dtype.itemsize:
            raise UsageError(
                f"'{data}' has {data_size} bytes, not a whole number of {self.dtype} tokens: it is truncated, or "
                f"belongs to another '{index.name}'; copy both files again"
            )
        mapped = np.memmap(index, dtype=np.uint8, mode="r").view(np.ndarray)
        parts = [("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_bounds), ("i1", num_sequences * has_modes)]
        arrays, start = [], HEADER.size
        for code, count in parts:
            arrays.append(np.frombuffer(mapped, dtype=code, count=count, offset=start))
            start += arrays[-1].nbytes
        self.lengths: NDArray[np.int32] = arrays[0]
        self.pointers: NDArray[np.int64] = arrays[1]
        self.document_indices: NDArray[np.int64] = arrays[2]
        self.modes: NDArray[np.int8] | None = arrays[3] if has_modes else None
        self.tokens: NDArray[Any] = _map(data, self.dtype, data_size)
        self._check_ends()

    def _check_ends(self) -> None:
        """Refuse common signs of a mismatched pair: wrong bounds of documents, or a wrong end of the last sequence."""
        first, last = int(self.document_indices[0]), int(self.document_indices[-1])
        if (first, last) != (0, len(self)):
            raise UsageError(
                f"'{idx_path(self.prefix)}' is damaged: its documents are sequences {first} to {last} of {len(self)}; "
                f"copy both files again, or preprocess again"
            )
        size, end, index = self.tokens.nbytes, self._end(), idx_path(self.prefix).name
        if end != size:
            reason = f"needs {end}: it is truncated, or" if end > size else f"describes {end}:"
            raise UsageError(
                f"'{bin_path(self.prefix)}' has {size} bytes, and '{index}' {reason} the two files do not belong "
                f"together; copy both files again, or preprocess again"
            )

    def _end(self) -> int:
        """The end in bytes of the sequence that is last in the file, which is usually the last one of the index."""
        if not len(self):
            return 0
        itemsize = self.dtype.itemsize
        last = int(self.pointers[-1]) + int(self.lengths[-1]) * itemsize
        if last >= self.tokens.nbytes:
            return last
        parts = (slice(start, start + CHUNK) for start in range(0, len(self), CHUNK))
        return max(int((self.pointers[part] + self.lengths[part].astype(np.int64) * itemsize).max()) for part in parts)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.lengths)

    def verify(self) -> None:
        """Check every length, pointer and bound, chunk by chunk; UsageError names the first wrong one."""
        itemsize, limit = self.dtype.itemsize, self.tokens.nbytes
        for start in range(0, len(self), CHUNK):
            lengths, pointers = (part[start : start + CHUNK] for part in (self.lengths, self.pointers))
            wrong = (lengths < 0) | (pointers < 0) | (pointers > limit - lengths.astype(np.int64) * itemsize)
            wrong |= pointers % itemsize != 0
            if wrong.any():
                found = start + int(wrong.argmax())
                raise UsageError(
                    f"'{idx_path(self.prefix)}' is damaged: sequence {found} has {self.lengths[found]} tokens at byte "
                    f"{self.pointers[found]} of {limit}; copy both files again, or preprocess again"
                )
        refuse_overlaps(self.lengths, self.pointers, itemsize, idx_path(self.prefix))
        for start in range(0, len(self.document_indices) - 1, CHUNK):
            if (np.diff(self.document_indices[start : start + CHUNK + 1]) < 0).any():
                raise UsageError(f"'{idx_path(self.prefix)}' is damaged: its documents overlap; copy it again")

    def read(self, sequence: int, offset: int = 0, count: int | None = None) -> NDArray[Any]:
        """Tokens of a sequence from `offset` on (all, or `count`), without a copy; raises IndexError beyond its end."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)}")
        length = int(self.lengths[sequence])
        count = length - offset if count is None else count
        if offset < 0 or count < 0 or offset + count > length:
            raise IndexError(f"tokens {offset} to {offset + count} of sequence {sequence}, which has {length}")
        start = int(self.pointers[sequence]) // self.dtype.itemsize + offset
        found: NDArray[Any] = self.tokens[start : start + count]
        return found

    def gather(self, sequences: Any, offsets: Any = 0, counts: Any = None) -> NDArray[Any]:
        """Tokens of many ranges, concatenated: range n is `counts[n]` tokens of `sequences[n]` from `offsets[n]` on.

        Offsets and counts may be scalars. Without counts, a range ends with its sequence; raises IndexError beyond it.
        """
        sequences = np.asarray(sequences, dtype=np.int64)
        if len(sequences) and not 0 <= sequences.min() <= sequences.max() < len(self):
            raise IndexError(f"sequences {sequences.min()} to {sequences.max()} of {len(self)}")
        offsets = np.broadcast_to(np.asarray(offsets, dtype=np.int64), sequences.shape)
        available = self.lengths[sequences] - offsets
        counts = available if counts is None else np.broadcast_to(np.asarray(counts, dtype=np.int64), sequences.shape)
        if (offsets < 0).any() or (counts < 0).any() or (counts > available).any():
            raise IndexError("a range exceeds its sequence")
        starts = self.pointers[sequences] // self.dtype.itemsize + offsets
        places: NDArray[np.int64] = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        found: NDArray[Any] = self.tokens[places]
        return found

    def in_order(self) -> Iterator[NDArray[Any]]:
        """The tokens of all sequences in order, in several arrays; without a copy if they are contiguous on disk."""
        itemsize = self.dtype.itemsize
        for start in range(0, len(self), CHUNK):
            sequences = np.arange(start, min(start + CHUNK, len(self)))
            lengths, pointers = self.lengths[sequences], self.pointers[sequences]
            ends = pointers + lengths.astype(np.int64) * itemsize
            if (pointers[1:] == ends[:-1]).all():
                yield self.tokens[int(pointers[0]) // itemsize : int(ends[-1]) // itemsize]
            else:
                yield from (self.read(sequence) for sequence in sequences.tolist())


def _size(path: Path) -> int:
    try:
        if not path.is_file():
            raise UsageError(f"'{path}' does not exist; {_instead(path)}")
        return path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}; make it readable") from None


def _instead(path: Path) -> str:
    """The remedy in the error for a missing file."""
    prefix = path.with_suffix("")
    if prefix.is_file():
        return f"'{prefix}' is not tokenized; run 'mplug data preprocess {prefix} --tokenizer NAME'"
    if prefix.is_dir() and (inside := sorted(prefix.glob("*.idx"))):
        return f"'{prefix}' is a folder; use a data set in it, such as '{inside[0].with_suffix('')}'"
    existing = sorted({str(index.with_suffix("")) for index in path.parent.glob("*.idx")} - {str(prefix)})[:NAMED]
    choices = f" (existing: {', '.join(existing)})" if existing else ""
    return f"use the path of an existing .bin and .idx without these suffixes{choices}"


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEADER.size)
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}; make it readable") from None


def _map(path: Path, dtype: "np.dtype[Any]", size: int) -> NDArray[Any]:
    if size == 0:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
