"""Schemas for reading the report beside a preprocessed data set, and the record of a part."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt


class WrittenFile(BaseModel):
    """A file of a data set: its size and its sha256."""

    model_config = ConfigDict(strict=True)
    bytes: NonNegativeInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Report(BaseModel):
    """The part of a report that `verify` compares: file name -> file of the data set."""

    files: Annotated[dict[str, WrittenFile], Field(min_length=1)]


class SavedBad(BaseModel):
    """A bad line, which is not a document."""

    model_config = ConfigDict(strict=True)
    path: str
    line: NonNegativeInt
    reason: str


class SavedPart(BaseModel):
    """The record of a part."""

    model_config = ConfigDict(strict=True)
    documents: NonNegativeInt
    tokens: NonNegativeInt
    lines: NonNegativeInt
    empty: NonNegativeInt
    num_bad: NonNegativeInt
    bad: list[SavedBad]


def read_report(path: Path) -> Report:
    """The report in a file; raises ValueError if it is invalid."""
    return Report.model_validate_json(path.read_bytes())
