"""The tokenizer of a published folder, by an installed plugin that reads one of its files."""

from pathlib import Path

from mplug.errors import UsageError, listed
from mplug.registry.entry_points import TOKENIZER_FILES, BrokenPlugin, Registry
from mplug_tokenization.contract import FolderTokenizer


def folder_tokenizer(registry: Registry, folder: Path) -> FolderTokenizer:
    """The tokenizer of a folder, by an installed plugin that reads one of its files."""
    table = registry.table(TOKENIZER_FILES)
    claims = [one for one in table if (folder / one.name).is_file()]
    if not claims:
        files = listed(sorted({one.name for one in table}))
        raise UsageError(
            f"'{folder}' has no tokenizer that an installed plugin reads ({files}); add one of these files"
        )
    claim = claims[0]
    entry = registry.find("tokenizers", f"{claim.distribution}/{claim.target}")
    plugin = registry.load(entry)
    if not callable(getattr(plugin, "read_folder", None)):
        raise BrokenPlugin(f"{entry.label} ({entry.origin}) names '{claim.name}' and has no method 'read_folder'")
    tokenizer: FolderTokenizer = plugin.read_folder(folder)
    return tokenizer
