"""Small files that are written whole or not at all."""

import os
from pathlib import Path

import pytest

from mplug import write_whole


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_keeps_its_old_content_and_leaves_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "record.json"
    write_whole(path, "old")

    def fails(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(*((os, "fsync", fails) if failing == "fsync" else (Path, "replace", fails)))
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]
