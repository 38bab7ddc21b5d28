"""The entries of the default run that this installation has no plugin for.

The default run names bundled plugins for what most runs want and none needs: the default kernel, the strategy of the
remaining ranks, observers. Where one is not installed, a run does without it. What the user names is never dropped.
"""

from dataclasses import replace

from mplug.config.sources import Key, Settings
from mplug.registry.entry_points import Registry

DISPENSABLE = {("kernels", "default"): "kernels", ("parallel", "data"): "parallel"}
"""Fields of which null means 'none' -> the kind of the plugin that they name."""
OBSERVERS = "extensions"


def without_missing(registry: Registry, base: Settings, settings: Settings) -> Settings:
    """`settings` without those of the default run (`base`) that name a plugin that is not installed."""
    kept = dict(settings)
    for key, setting in settings.items():
        if base.get(key) is not setting:
            continue
        if key in DISPENSABLE and setting.value is not None and _is_missing(registry, DISPENSABLE[key], setting.value):
            kept[key] = replace(setting, value=None, source=f"{setting.source}; '{setting.value}' is not installed")
        elif (
            key[0] == OBSERVERS
            and len(key) > 1
            and not _is_set(key[:2], base, settings)
            and _is_missing(registry, *key[:2])
        ):
            del kept[key]
    return kept


def _is_missing(registry: Registry, kind: str, name: object) -> bool:
    return name not in {entry.name for entry in registry.entries(kind)}


def _is_set(section: Key, base: Settings, settings: Settings) -> bool:
    """Whether the user has set a field of a section."""
    return any(key[:2] == section and base.get(key) is not setting for key, setting in settings.items())
