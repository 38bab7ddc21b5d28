"""Reads a file of ranks. tiktoken's own reader would cache a copy by the file's name and miss later changes."""

import base64
import binascii
from pathlib import Path

from mplug import UsageError

MAX_RANK = 2**31 - 3
"""The greatest rank: data sets store tokens as i32, and one more token may end a document."""
REMEDY = "download the file again"


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
            raise UsageError(
                f"tokenizers/tiktoken: '{path}', line {number}, repeats the token of an earlier line; {REMEDY}"
            )
        ranks[token] = rank
    if not ranks:
        raise UsageError(f"tokenizers/tiktoken: '{path}' is no file of ranks: it is empty; {REMEDY}")
    lacking = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if lacking is not None:
        raise UsageError(
            f"tokenizers/tiktoken: '{path}' has no rank for the byte {lacking}, and every byte needs one; {REMEDY}"
        )
    if len(set(ranks.values())) < len(ranks):
        raise UsageError(f"tokenizers/tiktoken: '{path}' has two tokens with the same rank; {REMEDY}")
    return ranks


def _entry(line: bytes, number: int, path: str) -> tuple[bytes, int]:
    try:
        token, rank = line.split()
        entry = base64.b64decode(token, validate=True), int(rank)
    except (ValueError, binascii.Error):
        entry = b"", 0
    if not entry[0] or not 0 <= entry[1] <= MAX_RANK:
        raise UsageError(
            f"tokenizers/tiktoken: '{path}' is no file of ranks: line {number} is not a base64 token and a number from "
            f"0 to {MAX_RANK}; {REMEDY}"
        )
    return entry


def _unreadable(path: str, error: OSError) -> str:
    from tiktoken import list_encoding_names

    if path in list_encoding_names():
        return (
            f"tokenizers/tiktoken: path '{path}' is the name of an encoding, and mplug downloads no files; download "
            f"its file of ranks and set path={path}.tiktoken"
        )
    return f"tokenizers/tiktoken: path '{path}' cannot be read: {error.strerror}; set path to a file *.tiktoken"
