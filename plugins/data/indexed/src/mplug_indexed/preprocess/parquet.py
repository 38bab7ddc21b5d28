"""Opens Parquet files, which need pyarrow."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mplug import UsageError


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """A Parquet file; raises UsageError if pyarrow is not installed, or cannot read the file."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UsageError(f"'{path}' is a Parquet file, and pyarrow is not installed; pip install pyarrow") from None
    try:
        table = ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise UsageError(f"'{path}' is not a valid Parquet file ({words_of(error)}); download it again") from None
    with table:
        yield table


def words_of(error: Exception) -> str:
    """The message of a library's error, on one line."""
    return " ".join(str(error).split())
