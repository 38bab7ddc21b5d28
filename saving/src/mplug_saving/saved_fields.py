"""The fields of a section that a checkpoint has saved, and of the same section of a run. Torch-free."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from mplug.config.binding import Chosen
from mplug.config.family import Contained
from mplug.config.sources import Key
from mplug.contracts.fields import Mark
from mplug.registry.bind_section import bind


def shown(value: Any) -> str:
    """A value as a config file writes it."""
    return json.dumps(value) if value in (None, "") or isinstance(value, bool) else str(value)


def leaves(model: Any, values: Mapping[str, Any], key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """The fields of a section and its nested sections; a mapping that is the value of one field is one value.

    `model` is the Config of the section, or the bound section, which knows the Config of a family in it.
    """
    for name, value in values.items():
        inner = _section_in(model, name)
        if isinstance(value, dict) and inner is not None:
            yield from leaves(inner, value, (*key, name))
        else:
            yield (*key, name), value


def _section_in(model: Any, name: str) -> Any:
    """The Config of a field that is a section; for a field of a bound section that is a family, its bound section."""
    described = _fields_of(model).get(name)
    value = getattr(model, name, None) if isinstance(model, BaseModel) and described is not None else None
    if isinstance(value, Contained):
        return value.config
    inner = described.annotation if described is not None else None
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def _fields_of(model: Any) -> Mapping[str, Any]:
    """The fields of a Config, or of a bound section."""
    if model is None:
        return {}
    found: Mapping[str, Any] = (type(model) if isinstance(model, BaseModel) else model).model_fields
    return found


def mark_of(model: Any, key: Key) -> Mark | None:
    """The mark of a field, or of the outermost section around it that has one."""
    for name in key:
        described = _fields_of(model).get(name)
        if described is None:
            return None
        found: Mark | None = next((mark for mark in described.metadata if isinstance(mark, Mark)), None)
        if found is not None:
            return found
        model = _section_in(model, name)
    return None


def bound(chosen: Chosen, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved section with the defaults of newer fields; unchanged if the plugin can no longer read it."""
    values = {name: value for name, value in saved.items() if name != "name"}
    config, problems = bind(chosen.plugin.Config, values)
    if problems:
        return values
    found: dict[str, Any] = config.model_dump(mode="json")
    return found
