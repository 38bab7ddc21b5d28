"""Raw settings: the values of each source with their place in it, and the precedence of sources.

A setting is one leaf of the config ('model.num_layers') with its value and its source. Sources are merged before any
name is resolved, so the host imports no plugin to read another plugin's config.
"""

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

Key = tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """A value and its source: 'run.yaml:12', '--set', 'preset nano'.

    `enclosing` are the sources of the mappings around a value of a file, the outermost first.
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
    held = {name_of(name, label) for name, _ in root.value} if isinstance(root, yaml.MappingNode) else set()
    if missing := [section for section in needed if section not in held]:
        raise UsageError(f"{label} lacks {counted(len(missing), 'section')} that every run has: {listed(missing)}")
    if root is not None:
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"{label} must hold a mapping of sections ('model:', 'trainer:', ...), not a single value")
        _collect(root, (), label, settings, set())
    return settings


def _collect(
    node: yaml.MappingNode, key: Key, label: str, settings: Settings, met: set[Key], enclosing: tuple[str, ...] = ()
) -> None:
    """Collect the leaves of a mapping in `settings`; `met` are the keys of leaves and sections so far."""
    for name_node, value_node in node.value:
        source = f"{label}:{name_node.start_mark.line + 1}"
        path = (*key, name_of(name_node, source))
        if path in met:
            raise UsageError(f"{source}: '{'.'.join(path)}' stands there twice; keep one")
        met.add(path)
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            _collect(value_node, path, label, settings, met, (*enclosing, source))
            continue
        value = construct(value_node, partial("{}:{}".format, label))
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
                f"{source} '{brief(assignment)}': write it as section.field=value, as in trainer.steps=100"
            )
        if len(key) > DEEPEST:
            raise UsageError(f"{source} '{brief(assignment)}': this is nested more than {DEEPEST} levels deep")
        settings = merge(settings, from_mapping(_assigned(text, f"{dotted} ({source})"), source, key))
    return settings


def _assigned(text: str, source: str) -> Any:
    """The value of an assignment; text that is not YAML is a string."""
    try:
        root = compose(text, lambda _: source)
        return None if root is None else construct(root, lambda _: source)
    except NotYaml:
        return text


def from_mapping(value: Any, source: str, key: Key = ()) -> Settings:
    """The settings of a nested mapping, all from one source."""
    if isinstance(value, Mapping) and (value or not key):
        found: Settings = {}
        for name, inner in value.items():
            found |= from_mapping(inner, source, (*key, str(name)))
        return found
    return {key: Setting(value, source)}


def merge(low: Settings, high: Settings) -> Settings:
    """`high` over `low`. If `high` names another plugin for a section, the section's fields in `low` are dropped."""
    dropped = {
        section
        for section in NAMED_SECTIONS
        if (section, "name") in low
        and (section, "name") in high
        and low[section, "name"].value != high[section, "name"].value
    }
    kept = {
        key: setting
        for key, setting in low.items()
        if key[0] not in dropped and not any(_overlap(key, other) for other in high)
    }
    return kept | high


def _overlap(one: Key, other: Key) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def nested(settings: Settings) -> dict[str, Any]:
    """Settings as the nested mapping that they came from."""
    tree: dict[str, Any] = {}
    for key, setting in settings.items():
        branch = tree
        for name in key[:-1]:
            branch = branch.setdefault(name, {})
        branch[key[-1]] = setting.value
    return tree


def source_of(settings: Settings, key: Key) -> str | None:
    """The source of a key; if it has none, that of a key inside it or of the nearest section around it."""
    for length in range(len(key), 0, -1):
        for known, setting in settings.items():
            if known[:length] == key[:length]:
                return (*setting.enclosing, setting.source)[length - 1] if setting.enclosing else setting.source
    return None
