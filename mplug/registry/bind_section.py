"""Bind values to a section of the host, a plugin or a tokenizer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError

from mplug.config.family import Contained, contained_fields, lists_of_sections
from mplug.config.problems import NO_SECTION, Problem, stated_problems
from mplug.config.sources import from_mapping, merge, nested
from mplug.errors import UsageError, listed, quoted, suggest
from mplug.registry.asking import fault
from mplug.registry.entry_points import BrokenPlugin, Registry
from mplug.registry.provided import provided

UNBOUND = object()
"""The value of a family that cannot be bound: no type accepts it, so no validator of the whole section runs."""


def bind(
    model: type[BaseModel], values: Mapping[str, Any], registry: Registry | None = None
) -> tuple[Any, list[Problem]]:
    """The bound section and an empty list; or None and all problems of the values.

    A field that is another plugin (`mplug.Family`, `mplug.Source`) is bound by this plugin, which `registry` finds
    (default: that of the interpreter).
    """
    found = provided("hints", registry)
    problems: list[Problem] = [] if found is None else found.before_binding(values)
    if problems:  # validators of the section may compute with these values
        return None, problems
    values, of_families = _with_families(model, values, registry)
    broken = {problem.path[0] for problem in of_families}
    try:
        config = model.model_validate(dict(values))
    except ValidationError as error:
        stated = stated_problems(error) if found is None else found.of_section(error, model, values)
        own = [one for one in stated if not one.path or one.path[0] not in broken]
        return None, [*own, *of_families]
    except Exception as error:
        return None, [Problem((), f"a validator of the section failed: {fault(error)}", is_fault=True)]
    problems = [*([] if found is None else found.after_binding(values, config)), *of_families]
    return (None if problems else config), problems


def _with_families(
    model: type[BaseModel], values: Mapping[str, Any], registry: Registry | None
) -> tuple[Mapping[str, Any], list[Problem]]:
    """The values with bound families, and the problems of those that cannot be bound."""
    bound, problems = dict(values), list[Problem]()
    for field, section in lists_of_sections(model).items():
        items = values.get(field)
        for number, item in enumerate(items if isinstance(items, list | tuple) else ()):
            if isinstance(item, Mapping):
                one, found = _with_families(section, item, registry)
                bound[field] = [*bound[field][:number], one, *bound[field][number + 1 :]]
                problems += [replace(problem, path=(field, str(number), *problem.path)) for problem in found]
    for field, kind in contained_fields(model).items():
        value = values.get(field)
        if isinstance(value, Mapping):
            contained, found = _bind_contained(kind, field, value, registry or Registry.of_process())
            bound[field] = UNBOUND if contained is None else contained
            problems += [replace(problem, path=(field, *problem.path)) for problem in found]
        elif value is not None and not isinstance(value, Contained):
            bound[field] = UNBOUND
            problems.append(Problem((field,), f"{NO_SECTION}, not {quoted(value)}"))
    return bound, problems


NOUNS = {"models": "a model family", "data": "a data plugin", "optimizers": "an optimizer"}
"""Kind of a contained plugin -> what an error calls it."""


def _bind_contained(
    contained: type[Contained], field: str, values: Mapping[str, Any], registry: Registry
) -> tuple[Contained | None, list[Problem]]:
    """The plugin of a section, or None and all problems of the section."""
    kind, word, preset = contained.kind, values.get("name"), values.get("preset")
    if not word:
        names = listed(registry.names(kind))
        return None, [Problem(("name",), f"is required: the name of {NOUNS[kind]} (installed: {names})")]
    try:
        entry = registry.find(kind, str(word))
        plugin = registry.load(entry)
    except UsageError as error:
        return None, [Problem(("name",), str(error), is_fault=isinstance(error, BrokenPlugin))]
    own = {name: value for name, value in values.items() if name not in ("name", "preset")}
    if preset is not None:
        try:
            own = nested(merge(from_mapping(preset_of(plugin, str(word), str(preset)), ""), from_mapping(own, "")))
        except ValueError as error:
            return None, [Problem(("preset",), str(error))]
    config, problems = bind(plugin.Config, own, registry)
    return (None if problems else contained(str(word), entry, plugin, config, field)), problems


def preset_of(plugin: type[Any], word: str, preset: str) -> Mapping[str, Any]:
    """The fields of the section 'model' that a preset of a family sets. ValueError if it has no such preset."""
    presets = getattr(plugin, "presets", {})
    if preset not in presets:
        names = list(map(str, presets))
        near = suggest(preset, names) or _containing(preset, names)
        raise ValueError(f"'{word}' has no preset '{preset}'{near} (it has {listed(names)})")
    fields: Mapping[str, Any] = presets[preset].get("model", {})
    return fields


def _containing(preset: str, names: list[str]) -> str:
    """'; did you mean '3.2-1b'?' for '1b': presets with the word as one of their parts."""
    found = [f"'{name}'" for name in names if preset.lower() in name.lower().split("-")]
    return f"; did you mean {' or '.join(found)}?" if found else ""
