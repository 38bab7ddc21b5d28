"""The format of Megatron's indexed data sets: raw tokens in `.bin`, starts of sequences and documents in `.idx`.

An `.idx` is little-endian and packed: a header of 34 bytes (`HEADER`), then i32[S] lengths of the sequences in tokens,
i64[S] offsets of their first bytes in the `.bin`, i64[D] bounds of the documents in sequences (first 0, last S), and
for multimodal data sets i8[S] modes.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from mplug import UsageError

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


def bin_path(prefix: Path | str) -> Path:
    """The path of a data set's tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    """The path of a data set's index."""
    return Path(f"{prefix}.idx")


def dtype_for(vocab_size: int) -> "np.dtype[Any]":
    """The dtype in which the tokens of a vocabulary are stored: u16 below 65,500 tokens, else i32."""
    return CODES[8] if vocab_size < SMALL_VOCABULARY else CODES[4]


def parse_header(header: bytes, size: int, path: Path) -> tuple["np.dtype[Any]", int, int, bool]:
    """(dtype, sequences, bounds of documents, whether there are modes), from the first bytes of a file of `size` bytes.

    Raises UsageError if they do not match the file's size; so the caller may allocate memory by the returned numbers.
    """
    if not header.startswith(MAGIC[: len(header)]):
        raise UsageError(
            f"'{path}' is not an index of this format: it does not begin with 'MMIDIDX'; preprocess the texts again"
        )
    if len(header) < HEADER.size:
        raise UsageError(f"'{path}' has {size} bytes, fewer than its header needs: it is truncated; copy it again")
    _, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if version != VERSION:
        raise UsageError(
            f"'{path}' has version {version} of the format, and mplug reads version {VERSION}; preprocess the texts "
            f"again"
        )
    if code not in CODES:
        raise UsageError(
            f"'{path}' states token type {code}, and the format has types 1 to {len(CODES)}: it is damaged; copy it "
            f"again"
        )
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    has_modes = size == expected + num_sequences and num_sequences > 0
    if num_bounds < 1 or not (size == expected or has_modes):
        raise UsageError(
            f"'{path}' has {size} bytes, and its header states {num_sequences} sequences and {num_bounds} bounds of "
            f"documents, which need {expected}: it is truncated or damaged; copy it again"
        )
    return CODES[code], num_sequences, num_bounds, has_modes
