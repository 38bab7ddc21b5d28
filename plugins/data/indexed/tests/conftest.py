"""What the tests of data sets in Megatron's format share. They import what only some machines have when they run."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """The documents of `preprocessed` as JSON lines."""
    from preprocessed import DOCUMENTS, lines_of, written

    return written(tmp_path / "texts.jsonl", lines_of(DOCUMENTS))


@pytest.fixture(scope="session", autouse=True)
def no_files_left() -> Iterator[None]:
    """The data sets of `indexed_files` are made when a test file imports it."""
    yield
    if "indexed_files" in sys.modules:
        shutil.rmtree(sys.modules["indexed_files"].FOLDER)
