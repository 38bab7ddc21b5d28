"""Reads and writes Megatron's indexed data sets: raw tokens in `.bin`, starts of sequences and documents in `.idx`.

An `.idx` is little-endian and packed: a header of 34 bytes (`HEADER`), then i32[S] lengths of the sequences in tokens,
i64[S] offsets of their first bytes in the `.bin`, i64[D] bounds of the documents in sequences (first 0, last S), and
for multimodal data sets i8[S] modes.
"""

import errno
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mplug import RunError, UsageError
from mplug_indexed.overlaps import refuse_overlaps

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the tokens' type, number of sequences S, number of documents + 1 D."""
CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
SMALL_VOCABULARY = 65_500
"""Vocabularies below this are stored as u16: the format's convention, a little below what 16 bits hold."""
LONGEST = 2**31 - 1
"""Tokens of the longest sequence: lengths are i32."""
CHUNK = 1 << 20
"""Sequences processed at once, to bound temporary memory."""
NAMED = 5
"""Maximum number of other data sets that the error for a missing one names."""
FULL = (errno.ENOSPC, errno.EDQUOT)
BROKEN = (errno.EIO, errno.EROFS, errno.EFBIG)
"""Error numbers of a failed environment, as opposed to wrong input by the user."""


def bin_path(prefix: Path | str) -> Path:
    """The path of a data set's tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    """The path of a data set's index."""
    return Path(f"{prefix}.idx")


def dtype_for(vocab_size: int) -> "np.dtype[Any]":
    """The dtype in which the tokens of a vocabulary are stored: u16 below 65,500 tokens, else i32."""
    return CODES[8] if vocab_size < SMALL_VOCABULARY else CODES[4]


def cannot_write(path: Path | str, error: OSError, instead: str = "choose another place") -> UsageError | RunError:
    """The error to raise if a file cannot be written: RunError if the disk is full or broken, else UsageError."""
    said = f"cannot write '{path}': {error.strerror or error}"
    if error.errno in FULL:
        return RunError(f"{said}; make room, then run the same command again, or {instead}")
    return (RunError if error.errno in BROKEN else UsageError)(f"{said}; {instead}")


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
                f"'{data}' has {data_size} bytes, no whole number of {self.dtype} tokens: it is cut off, or belongs to "
                f"another '{index.name}'; copy both files again"
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
            needs = f"'{index}' needs {end}: it is cut off, or" if end > size else f"'{index}' speaks of {end}:"
            raise UsageError(
                f"'{bin_path(self.prefix)}' has {size} bytes and {needs} the two are not one pair; copy both files "
                f"again, or preprocess again"
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
        left = self.lengths[sequences] - offsets
        counts = left if counts is None else np.broadcast_to(np.asarray(counts, dtype=np.int64), sequences.shape)
        if (offsets < 0).any() or (counts < 0).any() or (counts > left).any():
            raise IndexError("pieces beyond the ends of their sequences")
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
            raise UsageError(f"'{path}' is not there; {_instead(path)}")
        return path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}") from None


def _instead(path: Path) -> str:
    """The remedy in the error for a missing file."""
    prefix = path.with_suffix("")
    if prefix.is_file():
        return f"'{prefix}' is no data set yet: make one of it by 'mplug data preprocess {prefix} --tokenizer NAME'"
    if prefix.is_dir() and (inside := sorted(prefix.glob("*.idx"))):
        return f"'{prefix}' is a folder, name a data set in it, as '{inside[0].with_suffix('')}'"
    others = sorted({str(other.with_suffix("")) for other in path.parent.glob("*.idx")} - {str(prefix)})[:NAMED]
    near = f" (there are {', '.join(others)})" if others else ""
    return f"name a data set by what its .bin and .idx begin with, and have both{near}"


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEADER.size)
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}") from None


def parse_header(found: bytes, size: int, path: Path) -> tuple["np.dtype[Any]", int, int, bool]:
    """(dtype, sequences, bounds of documents, whether there are modes), from the first bytes of a file of `size` bytes.

    Raises UsageError if they do not match the file's size; so the caller may allocate memory by the returned numbers.
    """
    if not found.startswith(MAGIC[: len(found)]):
        raise UsageError(
            f"'{path}' is no index of this format: it does not begin with 'MMIDIDX'; preprocess the texts again"
        )
    if len(found) < HEADER.size:
        raise UsageError(f"'{path}' has {size} bytes, less than a header; it is cut off, copy it again")
    _, version, code, num_sequences, num_bounds = HEADER.unpack(found)
    if version != VERSION:
        raise UsageError(
            f"'{path}' has version {version} of the format; this reads version {VERSION}, preprocess the texts again"
        )
    if code not in CODES:
        raise UsageError(
            f"'{path}' says that tokens have type {code}, and the format has types 1 to {len(CODES)}; it is damaged, "
            f"copy it again"
        )
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    has_modes = size == expected + num_sequences and num_sequences > 0
    if num_bounds < 1 or not (size == expected or has_modes):
        raise UsageError(
            f"'{path}' has {size} bytes, and its header speaks of {num_sequences} sequences and {num_bounds} bounds of "
            f"documents, which take {expected}; it is cut off or damaged, copy it again"
        )
    return CODES[code], num_sequences, num_bounds, has_modes


def _map(path: Path, dtype: "np.dtype[Any]", size: int) -> NDArray[Any]:
    if size == 0:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


class Writer:
    """Writes a data set; its files get their names only after `close` has both on the disk.

    As a context manager it closes, or after an exception removes what it wrote. An earlier data set of the same prefix
    stays until `close`, which removes its `.idx` first, so that no index is ever beside the tokens of another data set.
    Raises RunError if the disk is full or broken, UsageError if the place cannot be written.
    """

    def __init__(self, prefix: Path | str, dtype: DTypeLike) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        if self.dtype not in CODES.values():
            raise ValueError(f"the format has no tokens of type {self.dtype}")
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
            raise UsageError(f"a document has {counts.max()} tokens; the format holds {LONGEST} of one, cut it")
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
            raise UsageError(f"'{other_prefix}' has {other.dtype} tokens and '{self.prefix}' {self.dtype} ones")
        if other.modes is not None:
            raise UsageError(f"'{other_prefix}' has modes (it is multimodal), which '{self.prefix}' would lose")
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
            _to_disk(self._file)
            with self._idx.open("xb", buffering=1 << 20) as file:
                file.writelines(self._index())
                _to_disk(file)
            idx_path(self.prefix).unlink(missing_ok=True)
            self._bin.replace(bin_path(self.prefix))
            self._idx.replace(idx_path(self.prefix))
            _folder_to_disk(self.prefix.parent)
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


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically."""
    aside = path.with_name(f".{path.name}.{os.getpid():x}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            _to_disk(file)
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):  # if not even its name could be written
            aside.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


def _cast(tokens: NDArray[Any], dtype: "np.dtype[Any]") -> NDArray[Any]:
    """Tokens in the dtype of the file; raises UsageError if one does not fit."""
    if tokens.dtype != dtype and dtype.kind in "iu" and len(tokens):
        info = np.iinfo(dtype)
        for token in (tokens.min(), tokens.max()):
            if not info.min <= token <= info.max:
                raise UsageError(f"token {token} does not fit into {dtype}; its vocabulary needs a wider type")
    return np.ascontiguousarray(tokens, dtype=dtype)


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _folder_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
