"""Object stores: copies of checkpoints, and folders and files that commands read and write, by fsspec.

The plugin is in `mplug_store.plugin`, which is imported lazily, because `mplug store --help` does not need it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mplug_store.plugin import CopiesCheckpoints

__all__ = ["CopiesCheckpoints"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'mplug_store' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module("mplug_store.plugin"), name)
