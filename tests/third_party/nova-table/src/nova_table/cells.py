"""The cells of one column of a table."""

import csv
from collections.abc import Iterator
from pathlib import Path

from mplug import UsageError


def cells(path: Path, column: str, delimiter: str) -> Iterator[str]:
    """The cells of a column, row by row; UsageError if the table does not have the column."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter)
        names = list(rows.fieldnames or ())
        if column not in names:
            found = ", ".join(names) or "none"
            raise UsageError(f"'{path}' has no column '{column}', only {found}; set data.column or data.delimiter")
        for row in rows:
            yield row[column] or ""
