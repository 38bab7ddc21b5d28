"""The fields of a section that a checkpoint has saved, and of the same section of a run. Torch-free."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from mplug.config.binding import Chosen
from mplug.config.sources import Key
from mplug.contracts import Mark


def shown(value: Any) -> str:
    """A value as a config file writes it."""
    return json.dumps(value) if value in (None, "") or isinstance(value, bool) else str(value)


def leaves(model: Any, values: Mapping[str, Any], key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """The fields of a section and its nested sections; a mapping that is the value of one field is one value."""
    for name, value in values.items():
        inner = model.model_fields[name].annotation if model is not None and name in model.model_fields else None
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, value, (*key, name))
        else:
            yield (*key, name), value


def mark_of(model: Any, key: Key) -> Mark | None:
    """The mark of a field, or of the outermost section around it that has one."""
    for name in key:
        described = model.model_fields.get(name) if model is not None else None
        if described is None:
            return None
        found: Mark | None = next((mark for mark in described.metadata if isinstance(mark, Mark)), None)
        if found is not None:
            return found
        model = described.annotation if hasattr(described.annotation, "model_fields") else None
    return None


def bound(chosen: Chosen, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved section with the defaults of newer fields; unchanged if the plugin can no longer read it."""
    values = {name: value for name, value in saved.items() if name != "name"}
    try:
        found: dict[str, Any] = chosen.plugin.Config.model_validate(values).model_dump(mode="json")
    except ValidationError:
        return values
    return found
