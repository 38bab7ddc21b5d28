"""Reads the documents of a split: rows of the files, in order, understood and encoded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mplug import UsageError
from mplug_datasets.rows import Content, ConversationEncoder, Damaged, Pair, Reading, Tally, TextEncoder
from mplug_datasets.sources import Source, open_rows, rows_of

GROUP = 256
"""Number of rows that are encoded together."""
CHECKED = 16
"""Maximum number of files of a path that are opened before a run is announced."""

Place = tuple[str, int]
"""The file of a row, and its number in the file, from 1."""


@dataclass(frozen=True)
class Reader:
    """Reads and encodes the rows of a split."""

    reading: Reading
    encoder: TextEncoder | ConversationEncoder
    refuses_damage: bool
    cache: Path

    def understood(self, row: dict[str, Any], place: Place, tally: Tally) -> Content | None:
        """The columns of a row, or None if it is damaged or belongs to the other split."""
        try:
            content = self.reading.content(row)
        except Damaged as error:
            tally.rows += 1
            self._damaged(place, str(error), tally)
            return None
        if not self.reading.keeps(content):
            return None
        tally.rows += 1
        return content

    def encoded(self, contents: Sequence[tuple[Place, Content]], tally: Tally) -> Iterator[Pair]:
        """The documents of rows; rows that cannot be encoded or are omitted are counted."""
        found = self.encoder.encode([content for _, content in contents], tally.count)
        for (place, _), pair in zip(contents, found, strict=True):
            if isinstance(pair, str):
                self._damaged(place, pair, tally)
            elif pair is not None and len(pair[0]):
                yield pair

    def _damaged(self, place: Place, reason: str, tally: Tally) -> None:
        file, number = place
        sentence = f"row {number} of '{file}' {reason}"
        if self.refuses_damage:
            raise UsageError(f"{sentence}; correct it, or set data.damaged=skip")
        tally.add(sentence)

    def documents(self, files: Sequence[str], tally: Tally) -> Iterator[Pair]:
        """All documents of the files, in order."""
        group = list[tuple[Place, Content]]()
        for file in files:
            number = 0
            for number, row in enumerate(rows_of(file, open_rows(file, self.cache)), start=1):
                content = self.understood(row, (file, number), tally)
                if content is not None:
                    group.append(((file, number), content))
                if len(group) == GROUP:
                    yield from self.encoded(group, tally)
                    group = []
            if not number:
                tally.empty_files.append(file)
        yield from self.encoded(group, tally)


def check_source(source: Source, reading: Reading, cache: Path, field: str) -> list[str]:
    """Refuse a source without rows or without the form's columns; returns a sentence about files without rows.

    Only the first files of a source are opened.
    """
    empty, checked = list[str](), source.files[:CHECKED]
    for file in checked:
        row = next(rows_of(file, open_rows(file, cache)), None)
        if row is None:
            empty.append(file)
        else:
            reading.refuse_columns(source.path, row, field)
    if len(empty) == len(source.files):
        raise UsageError(f"{field} '{source.path}' has no rows; set {field} to files with rows")
    return [f"{field} '{source.path}': files without rows: {', '.join(empty[:5])}"] if empty else []
