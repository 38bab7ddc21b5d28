"""A model family inside of another one: the type of a field of a Config. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, get_args

from mplug.config.entry import Entry

if TYPE_CHECKING:
    from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema


@dataclass(frozen=True)
class Family:
    """Another family that a model contains, chosen by its name: the type of a field of a family's Config.

        class SeeingConfig(BaseModel):
            decoder: Family = Field(description="the decoder of the text")

    The field's value is a section like 'model' itself: `name` chooses an installed family (also that of a third
    party), `preset` one of its presets, and the family's own Config binds all other fields. The host resolves it, so
    no family imports another one. `config` is the bound Config. The section of the host's field `model.frozen` stays
    that of the whole model.

    `build(run)` returns the family's own model and plan. `mplug.plan_within` makes a part of a larger plan of it.
    """

    name: str
    entry: Entry
    plugin: type[Any]
    config: Any

    @property
    def label(self) -> str:
        """'models/gpt'."""
        return self.entry.label

    def build(self, run: Any) -> Any:
        """What the family's `build_model` returns for a run: its `mplug.Model` on the meta device, with its plan.

        Call it in the hook `build_model`. The family sees its own config as `self.config`; `run.config.model` is that
        of the model around it.
        """
        build = self.plugin(self.config).build_model
        return build(**({"run": run} if "run" in signature(build).parameters else {}))

    def dumped(self) -> dict[str, Any]:
        """The section as plain data."""
        return {"name": self.name, **self.config.model_dump(mode="json")}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core import core_schema

        written = core_schema.plain_serializer_function_ser_schema(lambda family: family.dumped())
        return core_schema.is_instance_schema(cls, serialization=written)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        """The fields are those of the family that `name` chooses."""
        texts = {field: {"type": "string"} for field in ("name", "preset")}
        return {"type": "object", "properties": texts, "required": ["name"], "additionalProperties": True}


def family_fields(model: "type[BaseModel]") -> tuple[str, ...]:
    """The fields of a Config whose values are families."""
    fields = model.model_fields.items()
    return tuple(name for name, one in fields if one.annotation is Family or Family in get_args(one.annotation))


def families_in(config: Any) -> Iterator[tuple[tuple[str, ...], Family]]:
    """The families that a bound Config contains, with the steps to their fields, the innermost first."""
    for name in family_fields(type(config)):
        family = getattr(config, name)
        if isinstance(family, Family):
            yield from (((name, *steps), inner) for steps, inner in families_in(family.config))
            yield (name,), family
