"""Reading a file of ranks. tiktoken's own reader would keep a copy by the file's name, and miss that it has changed."""

import base64
import binascii
from pathlib import Path

from mplug import UsageError


def read_ranks(path: str) -> dict[bytes, int]:
    """Token -> rank. UsageError where it is no such file, or where it lacks one of the 256 bytes."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UsageError(_unreadable(path, error)) from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UsageError(
                f"tokenizers/tiktoken: '{path}' is no file of ranks: line {number} is not a base64 token and a number"
            ) from None
    lacking = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if lacking is not None:
        raise UsageError(f"tokenizers/tiktoken: '{path}' has no rank for the byte {lacking}; a text may have any byte")
    if len(set(ranks.values())) < len(ranks):
        raise UsageError(f"tokenizers/tiktoken: '{path}' gives two tokens one rank")
    return ranks


def _unreadable(path: str, error: OSError) -> str:
    from tiktoken import list_encoding_names

    if path in list_encoding_names():
        return (
            f"tokenizers/tiktoken: the encoding '{path}' would be downloaded, and mplug downloads nothing; fetch its "
            f"file of ranks yourself and set path={path}.tiktoken"
        )
    return f"tokenizers/tiktoken: path '{path}' cannot be read: {error.strerror}"
