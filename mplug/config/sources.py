"""Raw settings: the values of all sources with their positions in these sources, and the precedence of sources.

A setting is one leaf of the config ('model.num_layers') with its value and its source. Sources are merged before any
name is resolved, so the host imports no plugin to read another plugin's config.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from mplug.config.yaml_text import DEEPEST, NotYaml, compose, construct, name_of, read_text
from mplug.errors import UsageError, brief, counted, listed

NAMED_SECTIONS = ("model", "optimizer", "data")
"""Sections in which the field `name` chooses one plugin, and this plugin reads all other fields."""
RECIPE = "recipe"
"""The section that describes the recipe from which settings come. It changes nothing in a run."""

HOME = re.compile(r"~[^/\s]*/")

Key = tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """A value and its source: 'run.yaml:12', '--set', 'preset nano'.

    `enclosing` has the sources of the mappings that contain a value of a file, outermost first.
    """

    value: Any
    source: str
    enclosing: tuple[str, ...] = ()


Settings = dict[Key, Setting]


def read_file(path: Path, label: str | None = None, needed: Iterable[str] = ()) -> Settings:
    """The settings of a YAML file; each source is the file's name and line.

    Raises UsageError if a section of `needed` is missing.
    """
    return read_yaml(read_text(path), label or str(path), needed)


def read_yaml(text: str, label: str, needed: Iterable[str] = ()) -> Settings:
    """The settings of a YAML text, each with the source 'label:line'."""
    root = compose(text, partial("{}:{}".format, label))
    settings: Settings = {}
    names = {name_of(name, label) for name, _ in root.value} if isinstance(root, yaml.MappingNode) else set()
    if missing := [section for section in needed if section not in names]:
        lacks = f"{label} lacks {counted(len(missing), 'section')} that every run has: {listed(missing)}"
        raise UsageError(f"{lacks}; restore the file")
    if root is not None:
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"{label} must be a mapping of sections ('model:', 'trainer:', ...), not a single value")
        _collect(root, (), label, settings, set())
    return settings


def _collect(
    node: yaml.MappingNode, key: Key, label: str, settings: Settings, seen: set[Key], enclosing: tuple[str, ...] = ()
) -> None:
    """Add the leaves of a mapping to `settings`, and the keys of its leaves and sections to `seen`."""
    for name_node, value_node in node.value:
        source = f"{label}:{name_node.start_mark.line + 1}"
        path = (*key, with_home(name_of(name_node, source)))
        if path in seen:
            raise UsageError(f"{source}: '{'.'.join(path)}' is set twice; remove one of the two")
        seen.add(path)
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            _collect(value_node, path, label, settings, seen, (*enclosing, source))
            continue
        value = with_home(construct(value_node, partial("{}:{}".format, label)))
        if key or value not in (None, {}):  # an empty section changes nothing
            settings[path] = Setting(value, source, enclosing)


def read_assignments(assignments: Iterable[str], source: str = "--set") -> Settings:
    """Parse assignments such as 'model.num_layers=6' into settings; values are YAML."""
    settings: Settings = {}
    for assignment in assignments:
        dotted, equals, text = assignment.partition("=")
        key = tuple(dotted.split("."))
        if not equals or len(key) < 2 or not all(key):
            raise UsageError(
                f"{source} '{brief(assignment)}' is not an assignment; use section.field=value, as in trainer.steps=100"
            )
        if len(key) > DEEPEST:
            raise UsageError(f"{source} '{brief(assignment)}': the field is nested more than {DEEPEST} levels deep")
        settings = merge(settings, from_mapping(_assigned(text, f"{dotted} ({source})"), source, key))
    return settings


def _assigned(text: str, source: str) -> Any:
    """The value of an assignment; text that is not YAML is a string."""
    try:
        root = compose(text, lambda _: source)
        return None if root is None else with_home(construct(root, lambda _: source))
    except NotYaml:
        return with_home(text)


def with_home(value: Any) -> Any:
    """The value with the user's home in the place of '~' at the beginning of paths ('~/' and '~NAME/')."""
    if isinstance(value, str):
        return os.path.expanduser(value) if HOME.match(value) else value
    if isinstance(value, list):
        return [with_home(one) for one in value]
    if isinstance(value, dict):
        return {with_home(name): with_home(inner) for name, inner in value.items()}
    return value


def from_mapping(value: Any, source: str, key: Key = ()) -> Settings:
    """The settings of a nested mapping, all from one source."""
    if isinstance(value, Mapping) and (value or not key):
        settings: Settings = {}
        for name, inner in value.items():
            settings |= from_mapping(inner, source, (*key, str(name)))
        return settings
    return {key: Setting(value, source)}


def merge(low: Settings, high: Settings) -> Settings:
    """`high` over `low`. If `high` names another plugin for a section, the section's fields in `low` are dropped.

    The same holds for a section in the sections 'model' and 'data' that chooses a plugin (`mplug.Family`,
    `mplug.Source`), and for a mapping of options in them whose `type` is another one. A family's section loses its
    fields, but not its name, if `high` names a preset.
    """
    dropped = [key[:-1] for key in high if _names_plugin(key) and key in low and low[key].value != high[key].value]
    preset = [key[:-1] for key in high if len(key) > 2 and key[0] == "model" and key[-1] == "preset"]
    kept = {
        key: setting
        for key, setting in low.items()
        if not any(key[: len(section)] == section for section in dropped)
        and not any(key[: len(section)] == section and key != (*section, "name") for section in preset)
        and not any(_overlap(key, other) for other in high)
    }
    return kept | high


def _names_plugin(key: Key) -> bool:
    """Whether a field names what reads the fields beside it: a plugin, or the type of options."""
    is_contained = len(key) > 2 and key[0] in ("model", "data")
    is_name = key[-1] == "name" and (is_contained or (len(key) == 2 and key[0] in NAMED_SECTIONS))
    return is_name or (key[-1] == "type" and is_contained)


def _overlap(first: Key, second: Key) -> bool:
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]


def nested(settings: Settings) -> dict[str, Any]:
    """The values of settings as a nested mapping."""
    tree: dict[str, Any] = {}
    for key, setting in settings.items():
        branch = tree
        for name in key[:-1]:
            branch = branch.setdefault(name, {})
        branch[key[-1]] = setting.value
    return tree


def source_of(settings: Settings, key: Key) -> str | None:
    """The source of a key. If it is not set: the source of a key inside it, or of the nearest section around it."""
    for length in range(len(key), 0, -1):
        for other, setting in settings.items():
            if other[:length] == key[:length]:
                return (*setting.enclosing, setting.source)[length - 1] if setting.enclosing else setting.source
    return None
