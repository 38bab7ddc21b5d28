"""The settings of a run that starts with a folder of a format, whose description decides the section 'model'."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mplug.config.binding import Chosen, RunConfig
from mplug.config.defaults import under_fine_tuning
from mplug.config.entry import Entry
from mplug.config.family import Family
from mplug.config.sources import Key, Settings, from_mapping, merge, nested, source_of
from mplug.errors import UsageError, brief, listed, quoted
from mplug.registry.bind_section import bind
from mplug.registry.entry_points import ARCHITECTURES, TOKENIZER_FILES, BrokenPlugin, Registry
from mplug_pretrained.described import DescribedModel, PublicSettings
from mplug_pretrained.formats import Found, format_of, public_folder

DATA = "folder_settings"
"""A static method of a data plugin: from the folder of a published checkpoint to settings of its section."""


def with_public_settings(registry: Registry, base: Settings, overrides: Settings) -> tuple[Settings, Settings]:
    """(base, overrides), with the model that a published folder describes if `overrides` name one.

    A resumed run keeps the model that its folder states: its published folder is in `base`, not in `overrides`.
    Raises UsageError if no installed family reads the folder, if the family does not support its description, or if
    settings of the user contradict it; the error lists all of these settings.
    """
    folder = public_folder(overrides)
    opened = None if folder is None else format_of(folder, registry)
    if folder is None or opened is None:
        return base, overrides
    described: DescribedModel = opened.ask("describe", folder)
    path = described.path
    named = overrides.get(("model", "name"))
    entry, word = family_of(registry, described, None if named is None else str(named.value))
    plugin = registry.load(entry)
    found = read_settings(entry, plugin, opened, folder, path)
    preset, name = overrides.get(("model", "preset")), {("model", "name")}
    if preset is not None and preset.value in getattr(plugin, "presets", {}):
        of_preset = from_mapping(plugin.presets[preset.value], f"preset {preset.value}")
        overrides = merge(under_fine_tuning(of_preset, base), overrides)
        del overrides["model", "preset"]
    own = {key: setting for key, setting in overrides.items() if key[0] == "model" and key not in name}
    refuse_contradictions(entry.label, plugin.Config, path, found, own)
    model = from_mapping({"name": word, **found.choices, **found.fixed}, str(path), ("model",))
    base = {key: setting for key, setting in base.items() if key[0] != "model"}
    model = merge(model, data_settings(registry, folder, base, overrides))
    return base, merge(merge({}, model), overrides)


def data_settings(registry: Registry, folder: Path, base: Settings, overrides: Settings) -> Settings:
    """What the folder of a published checkpoint says about the data: its tokenizer and its chat template.

    A data plugin that uses them has a static method `folder_settings(folder, tokenizer, options)`, which returns
    settings of its section. `tokenizer` is the name of the plugin that reads the folder's tokenizer, and `options` are
    the options of this plugin. The settings of the user have precedence.
    """
    named = merge(base, overrides).get(("data", "name"))
    claim = next((one for one in registry.table(TOKENIZER_FILES) if (folder / one.name).is_file()), None)
    if named is None or claim is None:
        return {}
    try:
        plugin = registry.load(registry.find("data", str(named.value)))
    except UsageError:  # the resolver reports it
        return {}
    if not callable(getattr(plugin, DATA, None)):
        return {}
    found = getattr(plugin, DATA)(folder, claim.target, {"path": str((folder / claim.name).absolute())})
    return from_mapping(found, str(folder), ("data",))


def read_settings(entry: Entry, plugin: Any, opened: Found, folder: Path, path: Path) -> PublicSettings:
    """The settings that a folder describes for a family. UsageError for content that the family does not support."""
    try:
        found: PublicSettings | None = opened.format.settings(folder, plugin)
    except ValueError as error:
        raise UsageError(
            f"{entry.label} cannot read '{path}': {brief_reason(error)}; use a checkpoint that it supports"
        ) from None
    except UsageError:
        raise
    except Exception as error:
        raise BrokenPlugin(
            f"{entry.label} ({entry.origin}) fails to read '{path}': {type(error).__name__}: {error}; report it to the "
            f"authors of {entry.distribution}"
        ) from error
    if found is None:
        raise UsageError(f"{entry.label} ({entry.origin}) reads no published checkpoints; use another --model")
    known = set(plugin.Config.model_fields)
    if wrong := sorted({*found.fixed, *found.choices} - known):
        raise BrokenPlugin(
            f"{entry.label} ({entry.origin}): what it reads of '{path}' sets {listed(wrong)}, which its Config lacks"
        )
    return found


def brief_reason(error: ValueError) -> str:
    """The message of an error, on one line."""
    return " ".join(str(error).split())


def family_of(registry: Registry, described: DescribedModel, word: str | None) -> tuple[Entry, str]:
    """The family that reads a folder, and the word that names it: the one that the user named, or the only one."""
    path, architectures = described.path, described.architectures
    if described.family is not None:
        entry = registry.find("models", described.family)
        if word is not None and registry.find("models", word) != entry:
            raise UsageError(f"'{path}' describes a model of {entry.label}; use --model {described.family}")
        return entry, word or described.family
    if not architectures:
        raise UsageError(f"'{path}' names no architecture; download the file again, or use another folder")
    label = architectures[0]
    table = registry.table(ARCHITECTURES)
    if word is not None:
        entry = registry.find("models", word)
        own = [one.name for one in table if (one.distribution, one.target) == (entry.distribution, entry.name)]
        if not set(own) & set(architectures):
            raise UsageError(
                f"'{path}' describes '{brief(label)}', which {entry.label} does not read (it reads {listed(own)}); "
                f"use another --model, or leave it out"
            )
        return entry, word
    claims = [one for name in architectures for one in table if one.name == name]
    claims = [one for one in claims if one.name == claims[0].name]
    if not claims:
        readable = sorted({one.name for one in table})
        raise UsageError(
            f"no installed model family reads '{brief(label)}' of '{path}' (they read {listed(readable)}); install one "
            f"that does"
        )
    if len(claims) > 1:
        choices = " or ".join(f"--model {one.distribution}/{one.target}" for one in claims)
        raise UsageError(f"'{label}' is read by {listed(one.origin for one in claims)}; use {choices}")
    (claim,) = claims
    entry = registry.find("models", f"{claim.distribution}/{claim.target}")
    names = registry.names("models")
    return entry, entry.name if entry.name in names else f"{entry.distribution}/{entry.name}"


def _differ(one: Any, other: Any) -> bool:
    """Whether two settings give other models; a section may state it by `computes_like(other)`."""
    alike = getattr(one, "computes_like", None)
    return not alike(other) if callable(alike) and type(one) is type(other) else bool(one != other)


def _is_choice(name: str, found: PublicSettings, wanted: Any) -> bool:
    """Whether a user may choose the value of a field. A section that the folder describes may be null, or must fit."""
    return name in found.choices and not (name in found.altering and isinstance(wanted, BaseModel))


def refuse_contradictions(
    label: str, model: type[BaseModel], path: Path, found: PublicSettings, own: Settings, section: Key = ("model",)
) -> None:
    """Raise UsageError for settings of the user that give a field, other than the free ones, another value.

    `label` names what the Config `model` of a section describes.
    """
    needed, problems = bind(model, {**found.choices, **found.fixed})
    if problems:
        raise UsageError(f"'{path}' describes no model of {label}: {problems[0].sentence}")
    given = {name: value for name, value in _inside(own, section).items() if name in model.model_fields}
    base = from_mapping({**found.choices, **found.fixed}, "", section)
    wanted, problems = bind(model, _inside(merge(base, from_mapping(given, "", section)), section))
    if problems:  # the resolver reports them, with those of other sections
        return
    differing = [
        one
        for name in given
        if not _is_choice(name, found, getattr(wanted, name))
        if _differ(getattr(wanted, name), getattr(needed, name))
        for one in _differing((name,), getattr(wanted, name), getattr(needed, name))
    ]
    if differing:
        lines = "\n".join(
            f"  {'.'.join((*section, *key))} ({source_of(own, (*section, *key))}): {quoted(ours)}, but the weights "
            f"need {quoted(theirs)}"
            for key, ours, theirs in differing
        )
        raise UsageError(f"settings contradict '{path}'; remove them:\n{lines}")


def _inside(settings: Settings, section: Key) -> dict[str, Any]:
    """The fields of a section."""
    found: Any = nested(settings)
    for name in section:
        found = found.get(name, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


def _differing(key: Key, wanted: Any, needed: Any) -> Iterator[tuple[Key, Any, Any]]:
    """(key, value that the user wants, value that the weights need) of a field; of each such field of a family."""
    if not (isinstance(wanted, Family) and isinstance(needed, Family)):
        yield key, wanted, needed
    elif wanted.entry != needed.entry:
        yield (*key, "name"), wanted.name, needed.name
    else:
        for name in type(needed.config).model_fields:
            pair = getattr(wanted.config, name), getattr(needed.config, name)
            if _differ(*pair):
                yield from _differing((*key, name), *pair)


def model_of(config: RunConfig) -> Chosen:
    """The family of a run."""
    return next(one for one in config.chosen if one.section == ("model",))


def longest_sequence(config: RunConfig, folder: Path) -> int | None:
    """The length of the longest sequence that the model of a folder was made for; None if its family does not know."""
    chosen, opened = model_of(config), format_of(folder)
    assert opened is not None
    return read_settings(chosen.entry, chosen.plugin, opened, folder, opened.ask("describe", folder).path).longest
