"""The JSON Schema of a config file, with which an editor checks and completes the file."""

from collections.abc import Mapping
from copy import copy
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

from mplug.config import host_sections as sections
from mplug.config.binding import HOST_SECTIONS, KIND_OF_SECTION, OPTIONAL_SECTIONS, host_fields
from mplug.config.sources import NAMED_SECTIONS, RECIPE
from mplug.registry.entry_points import Registry


def config_schema(registry: Registry, names: Mapping[str, str]) -> dict[str, Any]:
    """The JSON Schema of a config file whose sections name these plugins ({'model': 'gpt', ...})."""
    fields: dict[str, Any] = {}
    for section in NAMED_SECTIONS:
        plugin = registry.load(registry.find(KIND_OF_SECTION[section], names[section]))
        extra: dict[str, Any] = {"name": (sections.PluginName, ...)}
        if section == "model":
            extra["preset"] = (str | None, None)
        extra |= {field: (one.annotation, one) for field, one in host_fields(section, plugin).items()}
        fields[section] = (_partial(create_model(section, __base__=plugin.Config, **extra)), None)
    for section, model in HOST_SECTIONS.items():
        fields[section] = (_partial(model), None)
    kernels: dict[str, Any] = dict.fromkeys(registry.slot_kinds(), (str | None, None))
    kernels["default"] = (str | list[str] | None, None)
    fields["kernels"] = (create_model("kernels", __config__=ConfigDict(extra="allow"), **kernels), None)
    parallel: dict[str, Any] = {"layout": (str, ""), "data": (str | None, None)}
    parallel |= {"balance": (bool, False), "read_once": (bool, False)}
    fields["parallel"] = (create_model("parallel", __config__=ConfigDict(extra="allow"), **parallel), None)
    fields |= dict.fromkeys(OPTIONAL_SECTIONS, (dict[str, Any], None))
    fields[RECIPE] = (_partial(sections.Recipe), None)
    whole = create_model("mplug run", __config__=ConfigDict(extra="forbid"), **fields)
    return TypeAdapter(whole).json_schema()


def _partial(model: type[BaseModel]) -> type[BaseModel]:
    """The same fields, all optional: a config file contains only the values that it changes."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        optional = copy(field)
        optional.default = None if field.is_required() else field.default
        fields[name] = (field.annotation, optional)
    return create_model(model.__name__, __config__=ConfigDict(extra="forbid"), **fields)
