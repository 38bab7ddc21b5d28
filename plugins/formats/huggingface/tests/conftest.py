"""The tiny published models of the tests of the format, each made once."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The `published.Made` of a file's tests."""
    from published import Made

    return Made(tmp_path_factory.mktemp("families"))


@pytest.fixture
def folder(models: Any, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a family's published folder, for a test to change."""
    return lambda family: shutil.copytree(models[family][0], tmp_path / "folder")
