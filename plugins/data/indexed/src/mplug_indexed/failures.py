"""The errors of files that cannot be written."""

import errno
from pathlib import Path

from mplug import RunError, UsageError, write_whole

FULL = (errno.ENOSPC, errno.EDQUOT)
BROKEN = (errno.EIO, errno.EROFS, errno.EFBIG)
"""Error numbers of a failed environment, as opposed to wrong input by the user."""


def cannot_write(path: Path | str, error: OSError, instead: str = "use another location") -> UsageError | RunError:
    """The error to raise if a file cannot be written: RunError if the disk is full or broken, else UsageError."""
    message = f"cannot write '{path}': {error.strerror or error}"
    if error.errno in FULL:
        return RunError(f"{message}; free some space and run the same command again, or {instead}")
    return (RunError if error.errno in BROKEN else UsageError)(f"{message}; {instead}")


def write_text(path: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise cannot_write(path, error) from None
