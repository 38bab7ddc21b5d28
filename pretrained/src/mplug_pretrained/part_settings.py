"""The settings of a run whose parts start with folders of formats, each of which decides a section of 'model'."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from mplug.config.binding import OF_LOSSES
from mplug.config.entry import Entry
from mplug.config.family import family_fields
from mplug.config.sources import Key, Setting, Settings, from_mapping, merge, source_of
from mplug.errors import UsageError, listed, suggest
from mplug.registry.entry_points import Registry
from mplug_pretrained.described import PublicSettings
from mplug_pretrained.folder_settings import (
    brief_reason,
    data_settings,
    family_of,
    read_settings,
    refuse_contradictions,
)
from mplug_pretrained.formats import Found, format_of, part_folders, public_folder

FIELD = "checkpoint.pretrained.parts"


def with_part_settings(registry: Registry, base: Settings, overrides: Settings) -> Settings:
    """The overrides, with what the folders of `checkpoint.pretrained.parts` say of their parts.

    Raises UsageError for a part that the family does not have, for a folder that no installed format reads or that
    describes another kind of part, and for settings of the user that contradict a folder.
    """
    folders, named = part_folders(overrides), merge(base, overrides).get(("model", "name"))
    if not folders or named is None or part_folders(base) == folders:
        return overrides  # a resumed run keeps what its folders say
    entry = registry.find("models", str(named.value))
    plugin, found = registry.load(entry), dict[Key, Setting]()
    families = [part for part in folders if part in family_fields(plugin.Config)]
    second = _second_models(registry, merge(base, overrides))
    _refuse_parts_of_whole(overrides, [part for part in folders if part not in second])
    for part, folder in folders.items():
        opened = _opened(registry, overrides, part, folder)
        if part in second:
            found |= _of_family(registry, overrides, (*second[part], part), opened, folder)
        elif part in families:
            found |= _of_family(registry, overrides, ("model", part), opened, folder)
            found |= data_settings(registry, folder, base, overrides)
        else:
            found |= _of_section(entry, plugin, overrides, part, opened, folder)
    preset, own = _preset_apart(plugin, overrides, families)
    empty = {key for key in own for part in second if part in folders and key == second[part]}  # --objective NAME
    return merge(merge(preset, found), {key: setting for key, setting in own.items() if key not in empty})


def _second_models(registry: Registry, named: Settings) -> dict[str, Key]:
    """The families that objectives of a run contain, by their fields, and the sections with these fields."""
    found = dict[str, Key]()
    for word in sorted({str(key[1]) for key in named if key[0] == OF_LOSSES and len(key) > 1}):
        try:
            plugin = registry.load(registry.find(OF_LOSSES, word))
        except UsageError:  # the resolver reports it
            continue
        found |= dict.fromkeys(family_fields(plugin.Config), (OF_LOSSES, word))
    return found


def _refuse_parts_of_whole(overrides: Settings, parts: list[str]) -> None:
    """Raise UsageError if a run begins with a folder of the whole model and one of a part of it."""
    folder = public_folder(overrides)
    if folder is not None and parts:
        raise UsageError(
            f"{FIELD}.{parts[0]} ({source_of(overrides, (*FIELD.split('.'), parts[0]))}): the run begins with the "
            f"whole model of '{folder}' (checkpoint.pretrained.path), which has this part; remove one of both"
        )


def _opened(registry: Registry, overrides: Settings, part: str, folder: Path) -> Found:
    opened = format_of(folder, registry)
    if opened is None:
        source = source_of(overrides, (*FIELD.split("."), part))
        reason = "no installed format reads it" if folder.exists() else "it does not exist, and mplug downloads nothing"
        raise UsageError(
            f"{FIELD}.{part} ({source}): '{folder}': {reason}; use a published folder on this machine (a run of mplug "
            f"is exported to one by 'mplug checkpoint export')"
        )
    return opened


def _of_family(registry: Registry, overrides: Settings, section: Key, opened: Found, folder: Path) -> Settings:
    """The section of a family that a model or an objective contains."""
    described = opened.ask("describe", folder)
    word = overrides.get((*section, "name"))
    entry, name = family_of(registry, described, None if word is None else str(word.value))
    plugin = registry.load(entry)
    if (*section, "preset") in overrides:
        raise UsageError(
            f"{'.'.join(section)}.preset ({source_of(overrides, (*section, 'preset'))}) contradicts "
            f"'{described.path}', which describes this part; remove it"
        )
    settings = read_settings(entry, plugin, opened, folder, described.path)
    refuse_contradictions(
        entry.label, plugin.Config, described.path, settings, _own(overrides, section, "name"), section
    )
    return from_mapping({"name": name, **settings.choices, **settings.fixed}, str(described.path), section)


def _of_section(entry: Entry, plugin: Any, overrides: Settings, part: str, opened: Found, folder: Path) -> Settings:
    """A section of the family's own Config."""
    known = [*family_fields(plugin.Config), *opened.ask("parts_of", plugin)]
    if part not in known:
        parts = f"its parts are {listed(map(repr, known))}" if known else "it has none"
        raise UsageError(
            f"{FIELD}.{part} ({source_of(overrides, (*FIELD.split('.'), part))}): models of {entry.label} have no part "
            f"'{part}' that folders of {opened.entry.label} hold{suggest(part, known)} ({parts})"
        )
    path, section = opened.ask("describe", folder).path, ("model", part)
    try:
        settings: PublicSettings = opened.format.part_settings(folder, plugin, part)
    except ValueError as error:
        raise UsageError(
            f"{entry.label} cannot read '{path}' for '{part}': {brief_reason(error)}; use a folder that it supports"
        ) from None
    own = {key: one for key, one in _own(overrides, section).items() if key[2] in settings.fixed}
    refuse_contradictions(f"{part} of {entry.label}", _config_of(plugin, part), path, settings, own, section)
    return from_mapping({**settings.choices, **settings.fixed}, str(path), section)


def _own(overrides: Settings, section: Key, *but: str) -> Settings:
    """The settings of the user in a section."""
    size = len(section)
    return {
        key: one for key, one in overrides.items() if key[:size] == section and key[size:] not in {(n,) for n in but}
    }


def _config_of(plugin: Any, part: str) -> type[BaseModel]:
    """The Config of a section of a family's Config, which may be null."""
    annotation = plugin.Config.model_fields[part].annotation
    kinds = (annotation, *get_args(annotation))
    return next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))


def _preset_apart(plugin: Any, overrides: Settings, families: list[str]) -> tuple[Settings, Settings]:
    """(the settings of the model's preset, the other overrides): what folders say has precedence over the preset.

    The preset says nothing of families that folders describe.
    """
    presets: Mapping[str, Any] = getattr(plugin, "presets", {})
    preset = overrides.get(("model", "preset"))
    if preset is None or preset.value not in presets:
        return {}, overrides
    fields = from_mapping(presets[preset.value], f"preset {preset.value}")
    fields = {key: one for key, one in fields.items() if not (key[0] == "model" and key[1] in families)}
    return fields, {key: one for key, one in overrides.items() if key != ("model", "preset")}
