"""The formats that are installed: by the name that a user types, or by the files of a folder. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mplug.config.entry import Entry
from mplug.config.sources import Settings
from mplug.errors import UsageError, listed
from mplug.registry.asking import asking
from mplug.registry.entry_points import FORMAT_FILES, BrokenPlugin, Registry
from mplug.registry.stores import local_path
from mplug_pretrained.described import DescribesModels

KIND = "formats"


@dataclass(frozen=True)
class Found:
    """An installed format: its entry, and the object that reads and writes folders (a `mplug_pretrained.Format`)."""

    entry: Entry
    format: Any

    @property
    def name(self) -> str:
        """The word that names it after --from and --to."""
        return self.entry.name

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method that only describes answers. BrokenPlugin if it fails."""
        with asking(self.entry.label, method):
            return getattr(self.format, method)(*arguments)


def load_format(registry: Registry, entry: Entry) -> Found:
    """An installed format. BrokenPlugin if it is none."""
    plugin = registry.load(entry)
    if not issubclass(plugin, DescribesModels):
        raise BrokenPlugin(f"{entry.label} ({entry.origin}): {plugin!r} is no subclass of mplug_pretrained.Format")
    with asking(entry.label, "__init__"):
        return Found(entry, plugin(plugin.Config()))


def format_named(word: str) -> Found:
    """The format of a name. UsageError if none is installed."""
    registry = Registry.of_process()
    return load_format(registry, registry.find(KIND, word))


def format_of(folder: Path, registry: Registry | None = None) -> Found | None:
    """The format of a folder that has no checkpoint of ours; None if no installed format reads it.

    Only formats that name a file of the folder (the group 'mplug.format_files') are imported. UsageError if several
    recognise it.
    """
    if not folder.is_dir() or (folder / "checkpoint.json").exists():
        return None
    registry = registry or Registry.of_process()
    claims = [one for one in registry.table(FORMAT_FILES) if (folder / one.name).is_file()]
    entries = dict.fromkeys(registry.find(KIND, f"{one.distribution}/{one.target}") for one in claims)
    found = [one for one in (load_format(registry, entry) for entry in entries) if one.ask("recognises", folder)]
    if len(found) > 1:
        raise UsageError(
            f"'{folder}' is recognised by {listed(f'{one.entry.label} ({one.entry.origin})' for one in found)}; "
            f"uninstall one of them, or remove its file from the folder"
        )
    return found[0] if found else None


def is_public(folder: Path) -> bool:
    """Whether a folder is of an installed format."""
    return format_of(folder) is not None


def public_folder(settings: Settings) -> Path | None:
    """The folder, if any, that `checkpoint.pretrained` names; it may be of any kind."""
    for key in (("checkpoint", "pretrained", "path"), ("checkpoint", "pretrained")):
        setting = settings.get(key)
        if setting is not None and isinstance(setting.value, str):
            return local_path(setting.value)
    return None


def part_folders(settings: Settings) -> dict[str, Path]:
    """The folders that `checkpoint.pretrained.parts` names, by the names of the parts; they may be of any kind."""
    start = ("checkpoint", "pretrained", "parts")
    named = {key[3]: one.value for key, one in settings.items() if len(key) == 4 and key[:3] == start}
    return {part: local_path(value) for part, value in named.items() if isinstance(value, str)}
