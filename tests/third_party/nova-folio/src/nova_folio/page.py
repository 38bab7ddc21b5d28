"""The page of a folio: the family, its settings, and the file of each tensor. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mplug import UsageError

PAGE = "folio.json"


@dataclass(frozen=True)
class Page:
    """What a page says. `files` are the names of the tensors' files."""

    family: str
    settings: dict[str, Any]
    files: dict[str, str]


def read_page(folder: Path) -> Page:
    """The page of a folder. UsageError for a folder without one, or with a damaged one."""
    path = folder / PAGE
    try:
        match json.loads(path.read_text(encoding="utf-8")):
            case {"family": str(family), "settings": dict(settings), "files": dict(files)}:
                return Page(family, settings, {str(name): Path(str(file)).name for name, file in files.items()})
            case _:
                raise ValueError("it has no family, settings and files")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read '{path}': {error}; copy the folder again") from None


def write_page(folder: Path, page: Page) -> None:
    """Write the page of a folder."""
    content = {"family": page.family, "settings": page.settings, "files": page.files}
    (folder / PAGE).write_text(json.dumps(content, indent=1), encoding="utf-8")
