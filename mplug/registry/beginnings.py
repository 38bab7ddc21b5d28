"""Settings that name weights to begin with or adapters, and what serves them. Imports no torch."""

from typing import Any

from mplug.config.sources import Settings
from mplug.registry.entry_points import Registry
from mplug.registry.provided import needed


def names_some(settings: Settings) -> bool:
    """Whether settings name weights to begin with (`checkpoint.pretrained`), or an adapter plugin."""
    return any(
        (key[:2] == ("checkpoint", "pretrained") and setting.value is not None)
        or (key[0] == "adapters" and len(key) > 1 and setting.value is not False)
        for key, setting in settings.items()
    )


def beginnings(registry: Registry | None = None) -> Any:
    """An object of the installed class. UsageError unless exactly one distribution brings one."""
    what = "weights that a run begins with (checkpoint.pretrained) or adapters"
    return needed("beginnings", what, "mplug-pretrained", registry)
