"""What a run keeps of the published checkpoint that it began with: the files beside the weights, and their form.

    runs/<name>/published/huggingface/files/          config.json, the tokenizer, the chat template ...
    runs/<name>/published/huggingface/tensors.json    the name, file and type of every tensor

`mplug checkpoint export` needs them, also when the original folder is gone. Imports no torch.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mplug import UsageError, write_whole
from mplug_huggingface_format.config_file import CONFIG, read_json
from mplug_huggingface_format.folder import INDEX

FILES, TENSORS = "files", "tensors.json"
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


def keep_published(path: Path, tensors: Mapping[str, Kept], folder: Path) -> None:
    """Copy what an export needs into a folder of a run. `tensors` are those of the original folder by public name."""
    (folder / FILES).mkdir(parents=True, exist_ok=True)
    for pattern in KEPT:
        for file in sorted(path.glob(pattern)):
            if file.name != INDEX and file.is_file() and file.stat().st_size <= LARGEST_FILE:
                target = folder / FILES / file.relative_to(path)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
    write_whole(folder / TENSORS, json.dumps({name: asdict(one) for name, one in tensors.items()}) + "\n")


def published_in(folder: Path) -> Published:
    """What a run has kept in a folder. UsageError if it is damaged."""
    try:
        tensors = {name: Kept(**one) for name, one in read_json(folder / TENSORS).items()}
    except TypeError:
        raise UsageError(f"'{folder / TENSORS}' is damaged; restore it from a backup, or remove '{folder}'") from None
    return Published(folder / FILES, read_json(folder / FILES / CONFIG), tensors)
