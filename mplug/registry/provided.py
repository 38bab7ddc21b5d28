"""Parts of the host that a distribution brings as one class, in an entry-point group of its own. Imports no torch."""

from importlib import import_module
from typing import Any

from mplug.errors import UsageError, listed
from mplug.registry.entry_points import PROVIDED, Registry, refuse_other_versions


def provided(group: str, registry: Registry | None = None) -> Any | None:
    """An object of the class that an installed distribution brings in a group; None if no distribution brings one.

    UsageError if several do.
    """
    assert group in PROVIDED, group
    entries = (registry or Registry.of_process()).table(group)
    if len(entries) > 1:
        owners = listed(entry.origin for entry in entries)
        raise UsageError(f"{owners} all bring what a run needs once ('mplug.{group}'); uninstall all but one of them")
    if not entries:
        return None
    refuse_other_versions(entries[0])
    module, _, attribute = entries[0].target.partition(":")
    return getattr(import_module(module), attribute)()


def needed(group: str, what: str, package: str, registry: Registry | None = None) -> Any:
    """The same. UsageError if no distribution brings one: `what` says which settings need it."""
    found = provided(group, registry)
    if found is None:
        raise UsageError(f"no installed package serves {what}; install {package}, or remove these settings")
    return found
