"""Families of published models as cases of tests."""

from typing import Any

import pytest

pytest.importorskip("transformers")

from published import FAMILIES


def quick(*names: str) -> list[Any]:
    """All families: those of `names` in the quick tests, the others in the wide set."""
    wide = pytest.mark.wide("families")
    return [name if name in names else pytest.param(name, marks=wide) for name in FAMILIES]
