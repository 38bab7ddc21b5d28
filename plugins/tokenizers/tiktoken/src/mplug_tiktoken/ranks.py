"""Reads a file of ranks. tiktoken's own reader would cache a copy by the file's name and miss later changes."""

import base64
import binascii
from pathlib import Path

from mplug import UsageError

GREATEST = 2**31 - 3
"""The greatest rank: data sets store tokens as i32, and one more token may end a document."""
FETCH = "fetch the file again"


def read_ranks(path: str) -> dict[bytes, int]:
    """Token -> rank. Raises UsageError if the file is invalid or lacks one of the 256 bytes."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UsageError(_unreadable(path, error)) from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        token, rank = _entry(line, number, path)
        if token in ranks:
            raise UsageError(f"tokenizers/tiktoken: '{path}', line {number}, has a token that has been; {FETCH}")
        ranks[token] = rank
    if not ranks:
        raise UsageError(f"tokenizers/tiktoken: '{path}' is no file of ranks: it is empty; {FETCH}")
    lacking = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if lacking is not None:
        raise UsageError(
            f"tokenizers/tiktoken: '{path}' has no rank for the byte {lacking}; a text may have any byte; {FETCH}"
        )
    if len(set(ranks.values())) < len(ranks):
        raise UsageError(f"tokenizers/tiktoken: '{path}' gives two tokens one rank; {FETCH}")
    return ranks


def _entry(line: bytes, number: int, path: str) -> tuple[bytes, int]:
    try:
        token, rank = line.split()
        found = base64.b64decode(token, validate=True), int(rank)
    except (ValueError, binascii.Error):
        found = b"", 0
    if not found[0] or not 0 <= found[1] <= GREATEST:
        raise UsageError(
            f"tokenizers/tiktoken: '{path}' is no file of ranks: line {number} is not a base64 token and a number from "
            f"0 to {GREATEST}; {FETCH}"
        )
    return found


def _unreadable(path: str, error: OSError) -> str:
    from tiktoken import list_encoding_names

    if path in list_encoding_names():
        return (
            f"tokenizers/tiktoken: the encoding '{path}' would be downloaded, and mplug downloads nothing; fetch its "
            f"file of ranks yourself and set path={path}.tiktoken"
        )
    return f"tokenizers/tiktoken: path '{path}' cannot be read: {error.strerror}; name a file *.tiktoken"
