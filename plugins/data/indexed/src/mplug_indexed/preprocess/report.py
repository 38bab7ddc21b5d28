"""The report that stands beside a preprocessed data set, and the record of a part, as they are read."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt


class WrittenFile(BaseModel):
    """A file of a data set: its size and its digest."""

    model_config = ConfigDict(strict=True)
    bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Report(BaseModel):
    """Of a report, what `verify` compares: the files of the data set by their names."""

    files: Annotated[dict[str, WrittenFile], Field(min_length=1)]


class SavedBad(BaseModel):
    """A line that is no document."""

    model_config = ConfigDict(strict=True)
    path: str
    line: NonNegativeInt
    reason: str


class SavedPart(BaseModel):
    """What a chunk has become."""

    model_config = ConfigDict(strict=True)
    documents: NonNegativeInt
    tokens: NonNegativeInt
    lines: NonNegativeInt
    empty: NonNegativeInt
    num_bad: NonNegativeInt
    bad: list[SavedBad]


def read_report(path: Path) -> Report:
    """The report in a file; ValueError where it is none."""
    return Report.model_validate_json(path.read_bytes())
