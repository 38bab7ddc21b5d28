"""The entries of the default run that this installation has no plugin for.

The default run names bundled plugins for what most runs want and none needs: the default kernel, the strategy of the
remaining ranks, observers. A run does without one that is not installed. Settings of the user are never dropped.

Every run needs a model, an optimizer and data. Where those of the default run are not installed, the message names what
to install, and the options by which the user names others.
"""

from collections.abc import Mapping
from dataclasses import replace

from mplug.config.binding import KIND_OF_SECTION
from mplug.config.defaults import is_default
from mplug.config.sources import NAMED_SECTIONS, Key, Setting, Settings
from mplug.errors import listed
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
        if key in DISPENSABLE:
            kept[key] = _without_absent(registry, DISPENSABLE[key], setting)
        elif (
            key[0] == OBSERVERS
            and len(key) > 1
            and not _is_set(key[:2], base, settings)
            and _is_missing(registry, *key[:2])
        ):
            del kept[key]
    return kept


def _without_absent(registry: Registry, kind: str, setting: Setting) -> Setting:
    """A plugin or a list of plugins, without those that are not installed; None if none is left."""
    names = setting.value if isinstance(setting.value, list) else [setting.value]
    absent = [name for name in names if name is not None and _is_missing(registry, kind, name)]
    if not absent:
        return setting
    words, are = listed(f"'{name}'" for name in absent), "is" if len(absent) == 1 else "are"
    present = [name for name in names if name not in absent]
    return replace(setting, value=present or None, source=f"{setting.source}; {words} {are} not installed")


def missing_defaults(registry: Registry, base: Settings, settings: Settings) -> dict[str, str]:
    """Section -> plugin, for the sections whose plugin only the default run (`base`) names, and which is missing."""
    keys = [(section, "name") for section in NAMED_SECTIONS if (section, "name") in settings]
    return {
        key[0]: str(settings[key].value)
        for key in keys
        if settings[key] is base.get(key)
        and is_default(settings[key])
        and _is_missing(registry, KIND_OF_SECTION[key[0]], settings[key].value)
    }


def missing_message(registry: Registry, names: Mapping[str, str]) -> str:
    """What to install, or to name, where these plugins of the default run are missing.

    The distribution of the plugin NAME of the default run is mplug-NAME.
    """
    labels = listed(f"{KIND_OF_SECTION[section]}/{name}" for section, name in names.items())
    packages = " ".join(f"mplug-{name}" for name in names.values())
    installed = {section: listed(registry.names(KIND_OF_SECTION[section])) for section in names}
    options = listed(f"--{section} (installed: {found})" for section, found in installed.items())
    are, them, others = ("is", "it", "another") if len(names) == 1 else ("are", "them", "others")
    return (
        f"{labels} of the default run {are} not installed; install {them} (pip install {packages}), or name {others} "
        f"with {options}"
    )


def _is_missing(registry: Registry, kind: str, name: object) -> bool:
    return name not in {entry.name for entry in registry.entries(kind)}


def _is_set(section: Key, base: Settings, settings: Settings) -> bool:
    """Whether the user has set a field of a section."""
    return any(key[:2] == section and base.get(key) is not setting for key, setting in settings.items())
