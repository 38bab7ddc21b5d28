"""The files of indexed data sets, for programs that read or write them without mplug's commands. Imports no torch."""

from mplug_indexed.format import bin_path, dtype_for, idx_path
from mplug_indexed.reader import Reader
from mplug_indexed.writer import Writer

__all__ = ["Reader", "Writer", "bin_path", "dtype_for", "idx_path"]
