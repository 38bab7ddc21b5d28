"""What a run keeps of the published checkpoint that it began with: the files beside the weights, and their form.

    runs/<name>/published/files/          config.json, the tokenizer, the chat template, generation_config.json ...
    runs/<name>/published/tensors.json    the name, file and type of every tensor

`mplug checkpoint export` needs them, also when the original folder is gone. Imports no torch.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mplug.checkpoint.public_folder import INDEX
from mplug.config.public import CONFIG, read_json
from mplug.errors import UsageError
from mplug.files import write_whole

PUBLISHED, FILES, TENSORS = "published", "files", "tensors.json"
KEPT = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.md", "LICENSE*", "additional_chat_templates/*")
"""The files beside the weights."""
LARGEST_FILE = 1 << 28
"""Maximum size in bytes of a file that is kept: a tokenizer has at most some tens of megabytes."""


@dataclass(frozen=True)
class Kept:
    """A tensor of the original folder: its name there, its file, and torch's name of its type."""

    name: str
    file: str
    dtype: str


@dataclass(frozen=True)
class Published:
    """The original folder of a run: its files beside the weights, its config.json, and its tensors by public name."""

    files: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Kept]


def keep_published(path: Path, tensors: Mapping[str, Kept], directory: Path) -> None:
    """Copy what an export needs into the folder of a run. `tensors` are those of the folder by public name."""
    folder = directory / PUBLISHED
    (folder / FILES).mkdir(parents=True, exist_ok=True)
    for pattern in KEPT:
        for file in sorted(path.glob(pattern)):
            if file.name != INDEX and file.is_file() and file.stat().st_size <= LARGEST_FILE:
                target = folder / FILES / file.relative_to(path)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
    write_whole(folder / TENSORS, json.dumps({name: asdict(one) for name, one in tensors.items()}) + "\n")


def carry_published(source: Path, directory: Path) -> None:
    """Copy what another run has kept into the folder of a run that begins with its weights."""
    if source.is_dir():
        shutil.copytree(source, directory / PUBLISHED, dirs_exist_ok=True)


def published_of(directory: Path) -> Published | None:
    """What a run has kept; None if it did not begin with a published checkpoint."""
    folder = directory / PUBLISHED
    if not folder.is_dir():
        return None
    try:
        tensors = {name: Kept(**one) for name, one in read_json(folder / TENSORS).items()}
    except TypeError:
        raise UsageError(f"'{folder / TENSORS}' is damaged; restore it from a backup, or remove '{folder}'") from None
    return Published(folder / FILES, read_json(folder / FILES / CONFIG), tensors)
