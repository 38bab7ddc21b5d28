"""Distillation: a student learns the probabilities of a frozen teacher, or the largest of them from a file.

The plugins are in `mplug_distill.plugin`, which is imported lazily, because `mplug teach --help` does not need it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mplug_distill.plugin import Distillation
    from mplug_distill.taught import Taught

__all__ = ["Distillation", "Taught"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'mplug_distill' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module("mplug_distill.plugin"), name)
