"""The defaults of a run that fine-tunes, which begins with weights or trains adapters.

They lie over those of the default run, and under a preset, the description of a published folder and the settings of
the user. The general ones are in a data file. An optimizer or an adapter plugin that the run names brings settings of
its own in the attribute `fine_tuning` of its class: sections with their fields, as a preset has them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from mplug.config.binding import KIND_OF_SECTION, RunConfig
from mplug.config.defaults import FINE_TUNING, OWN_FINE_TUNING, is_default, is_fine_tuning_default
from mplug.config.entry import Entry
from mplug.config.sources import NAMED_SECTIONS, Key, Setting, Settings, from_mapping, merge, read_file
from mplug.errors import UsageError, listed
from mplug.registry.beginnings import names_some
from mplug.registry.entry_points import BrokenPlugin, Registry

ATTRIBUTE = "fine_tuning"
ADAPTERS = "adapters"


def with_fine_tuning(registry: Registry, base: Settings, overrides: Settings) -> Settings:
    """`base` with the defaults of fine-tuning, if `overrides` ask for it. A saved run keeps its own settings.

    Raises UsageError if two plugins bring different values of a field that the user has not set.
    """
    name = base.get(("model", "name"))
    if name is None or not is_default(name) or not names_some(overrides):
        return base
    named = merge(base, overrides)
    tuned = _fitting(fine_tuning_settings(), named)
    for entry in _plugins(registry, named):
        own = _fitting(_brought(registry, entry, named), named)
        _refuse_two_values(tuned, own, overrides)
        tuned = merge(tuned, own)
    replaced = {
        key: setting
        for key, setting in tuned.items()
        if not _repeats_a_name(key, setting, base) and (key not in base or is_default(base[key]))
    }
    return merge(base, replaced)


def fine_tuning_settings() -> Settings:
    """The general settings that replace those of the default run."""
    return read_file(Path(__file__).with_name(FINE_TUNING), FINE_TUNING)


def fine_tuning_line(config: RunConfig) -> str:
    """A line with the defaults of fine-tuning that stand in a config, and a rate that is none; empty without any."""
    shown = {
        ".".join(key): setting.value
        for key, setting in sorted(config.settings.items())
        if is_fine_tuning_default(setting) and not _names_a_plugin(key)
    }
    if not shown:
        return ""
    values = listed(f"{field}={value}" for field, value in shown.items())
    rate = getattr(config.optimizer, "lr", None)
    unset = rate is not None and ("optimizer", "lr") not in config.settings
    name = config.settings["optimizer", "name"].value
    notes = [f"optimizer.lr={rate} is the default of '{name}' for any run"] if unset else []
    for number, group in enumerate(config.groups):
        own = group.optimizer
        if own is not None and "lr" not in own.config.model_fields_set:
            field = f"optimizer.groups.{number}.optimizer.lr"
            notes.append(f"{field}={own.config.lr} is the default of '{own.name}' for any run")
    return "; ".join([f"defaults of fine-tuning: {values}", *notes, "your settings replace them"])


def _plugins(registry: Registry, named: Settings) -> Iterator[Entry]:
    """The optimizer of a run and then its adapters; the resolver reports names that do not exist."""
    optimizer = named.get(("optimizer", "name"))
    words = [] if optimizer is None else [("optimizers", str(optimizer.value))]
    adapters = {key[1] for key, setting in named.items() if key[0] == ADAPTERS and setting.value is not False}
    for kind, word in [*words, *((ADAPTERS, name) for name in sorted(adapters))]:
        try:
            yield registry.find(kind, word)
        except UsageError:
            continue


def _brought(registry: Registry, entry: Entry, named: Settings) -> Settings:
    """The defaults of fine-tuning of one plugin; those of an optimizer are for this optimizer."""
    try:
        plugin = registry.load(entry)
    except UsageError:  # the resolver reports it
        return {}
    own = getattr(plugin, ATTRIBUTE, {})
    if not isinstance(own, Mapping) or not all(isinstance(fields, Mapping) for fields in own.values()):
        raise BrokenPlugin(
            f"{entry.label} ({entry.origin}): '{ATTRIBUTE}' is not a mapping of sections; report it to the authors of "
            f"{entry.distribution}"
        )
    settings = from_mapping(dict(own), f"{OWN_FINE_TUNING}{entry.label}")
    name = ("optimizer", "name")
    return {name: named[name], **settings} if entry.kind == "optimizers" and settings else settings


def _fitting(settings: Settings, named: Settings) -> Settings:
    """The settings without the sections that are for another plugin than that of the run."""
    other = {
        section
        for section in KIND_OF_SECTION
        if (one := settings.get((section, "name")))
        and one.value != getattr(named.get((section, "name")), "value", None)
    }
    return {key: setting for key, setting in settings.items() if key[0] not in other}


def _repeats_a_name(key: Key, setting: Setting, base: Settings) -> bool:
    """Whether a setting names the plugin that `base` names."""
    return _names_a_plugin(key) and key in base and base[key].value == setting.value


def _names_a_plugin(key: Key) -> bool:
    return key[0] in NAMED_SECTIONS and key[1:] == ("name",)


def _refuse_two_values(tuned: Settings, own: Settings, overrides: Settings) -> None:
    """Raise UsageError for a field that two adapter plugins set to different values, and the user does not set."""
    for key, setting in own.items():
        other = tuned.get(key)
        if other is None or other.value == setting.value or key in overrides:
            continue
        if all(one.source.startswith(f"{OWN_FINE_TUNING}{ADAPTERS}/") for one in (other, setting)):
            sources = " and ".join(
                f"{one.value} ({one.source.removeprefix(OWN_FINE_TUNING)})" for one in (other, setting)
            )
            raise UsageError(f"the defaults of {'.'.join(key)} for fine-tuning differ: {sources}; set this field")
