"""Settings that name weights to begin with or adapters, and the installed package that serves them. Imports no torch.

The host reads the checkpoints that a run resumes, and no others. A distribution brings one class in the entry-point
group 'mplug.beginnings'; its methods are those of `mplug.training.beginnings.Beginnings`.
"""

from importlib import import_module
from typing import Any

from mplug.config.sources import Settings
from mplug.errors import UsageError, listed
from mplug.registry.entry_points import BEGINNINGS, Registry, refuse_other_versions


def names_some(settings: Settings) -> bool:
    """Whether settings name weights to begin with (`checkpoint.pretrained`), or an adapter plugin."""
    return any(
        (key[:2] == ("checkpoint", "pretrained") and setting.value is not None)
        or (key[0] == "adapters" and len(key) > 1 and setting.value is not False)
        for key, setting in settings.items()
    )


def beginnings(registry: Registry | None = None) -> Any:
    """An object of the installed class. UsageError unless exactly one distribution brings one."""
    if (found := installed_beginnings(registry)) is None:
        raise UsageError(
            "no installed package serves weights that a run begins with (checkpoint.pretrained) or adapters; install "
            "mplug-pretrained, or remove these settings"
        )
    return found


def installed_beginnings(registry: Registry | None = None) -> Any | None:
    """An object of the installed class; None if no distribution brings one. UsageError if several do."""
    entries = (registry or Registry()).table(BEGINNINGS)
    if len(entries) > 1:
        owners = listed(entry.origin for entry in entries)
        raise UsageError(f"{owners} all serve the weights that runs begin with; uninstall all but one of them")
    if not entries:
        return None
    refuse_other_versions(entries[0])
    module, _, attribute = entries[0].target.partition(":")
    return getattr(import_module(module), attribute)()
