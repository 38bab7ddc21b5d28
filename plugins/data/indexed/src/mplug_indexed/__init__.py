"""Token corpora in Megatron's `.bin` and `.idx` files: memory-mapped, blended, and sampled in the same order.

The plugin is in `mplug_indexed.plugin`, which is imported lazily, because `mplug data --help` does not need it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mplug_indexed.plugin import Indexed

__all__ = ["Indexed"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'mplug_indexed' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module("mplug_indexed.plugin"), name)
