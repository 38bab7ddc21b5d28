"""A plugin inside of a section: a model family in another one, data in other data, the optimizer of a group."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin

from mplug.config.entry import Entry
from mplug.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema


@dataclass(frozen=True)
class Contained:
    """Another plugin that a plugin contains, chosen by its name: what its subclasses share.

    The field's value is a section of its own: `name` chooses an installed plugin (also that of a third party), and the
    plugin's own Config binds all other fields. The host resolves it, so no plugin imports another one. `config` is the
    bound Config.
    """

    kind: ClassVar[str]
    """The kind of the plugin."""
    section: ClassVar[str | None] = None
    """The section whose fields the plugin's refusals name; those inside of it are then named by their whole path."""

    name: str
    entry: Entry
    plugin: type[Any]
    config: Any
    field: str
    """The field of the Config around it."""

    @property
    def label(self) -> str:
        """'models/gpt'."""
        return self.entry.label

    @cached_property
    def _created(self) -> Any:
        return self.plugin(self.config)

    def call(self, hook: str, **given: Any) -> Any:
        """What the plugin's hook returns; None if it does not have this hook. `given` are all arguments of the hook.

        The plugin sees its own config as `self.config`; `run.config` is that of the run. A refusal names the plugin's
        fields as the user writes them: 'data.of.path'.
        """
        method = getattr(self._created, hook, None)
        if method is None:
            return None
        try:
            return method(**{name: value for name, value in given.items() if name in signature(method).parameters})
        except UsageError as error:
            error.args = tuple(self._with_paths(one) if isinstance(one, str) else one for one in error.args)
            raise

    def _with_paths(self, text: str) -> str:
        if self.section is None:
            return text
        fields = "|".join(map(re.escape, type(self.config).model_fields))
        return re.sub(rf"(?<![\w.]){self.section}\.(?=({fields})(?!\w))", f"{self.section}.{self.field}.", text)

    def dumped(self) -> dict[str, Any]:
        """The section as plain data."""
        return {"name": self.name, **self.config.model_dump(mode="json")}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core import core_schema

        written = core_schema.plain_serializer_function_ser_schema(lambda contained: contained.dumped())
        return core_schema.is_instance_schema(cls, serialization=written)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        """The fields are those of the plugin that `name` chooses."""
        texts = {field: {"type": "string"} for field in ("name", "preset")}
        return {"type": "object", "properties": texts, "required": ["name"], "additionalProperties": True}


@dataclass(frozen=True)
class Family(Contained):
    """Another family that a model contains, chosen by its name: the type of a field of a family's Config.

        class SeeingConfig(BaseModel):
            decoder: Family = Field(description="the decoder of the text")

    The field's value is a section like 'model' itself (`Contained`); `preset` chooses one of the family's presets. The
    section of the host's field `model.frozen` stays that of the whole model.

    `build(run)` returns the family's own model and plan. `mplug_nn.plan_within` makes a part of a larger plan of it.
    """

    kind, section = "models", "model"

    def build(self, run: Any) -> Any:
        """What the family's `build_model` returns for a run: its `mplug.Model` on the meta device, with its plan.

        Call it in the hook `build_model`. The family sees its own config as `self.config`; `run.config.model` is that
        of the model around it.
        """
        build = self.plugin(self.config).build_model
        return build(**({"run": run} if "run" in signature(build).parameters else {}))


@dataclass(frozen=True)
class Source(Contained):
    """Another data plugin, whose samples a data plugin changes: the type of a field of its Config.

        class ShuffledConfig(BaseModel):
            of: Source = Field(description="the data whose samples are shuffled")

    The field's value is a section like 'data' itself (`Contained`). The plugin around it implements the hooks of data
    plugins, and calls those of the source in them (`call`).
    """

    kind, section = "data", "data"


@dataclass(frozen=True)
class GroupOptimizer(Contained):
    """The optimizer of a group of parameters: a section like 'optimizer' itself, without the host's fields in it."""

    kind = "optimizers"


def contained_fields(model: "type[BaseModel]") -> dict[str, type[Contained]]:
    """The fields of a Config whose values are other plugins, and the type of each."""
    found = {}
    for name, field in model.model_fields.items():
        for one in (field.annotation, *get_args(field.annotation)):
            if isinstance(one, type) and issubclass(one, Contained):
                found[name] = one
    return found


def family_fields(model: "type[BaseModel]") -> tuple[str, ...]:
    """The fields of a Config whose values are families."""
    return tuple(name for name, one in contained_fields(model).items() if one is Family)


def lists_of_sections(model: "type[BaseModel]") -> "dict[str, type[BaseModel]]":
    """The fields of a Config whose values are lists of sections that contain other plugins, and their type."""
    from pydantic import BaseModel

    found = {}
    for name, field in model.model_fields.items():
        for one in get_args(field.annotation) if get_origin(field.annotation) in (list, tuple) else ():
            if isinstance(one, type) and issubclass(one, BaseModel) and contained_fields(one):
                found[name] = one
    return found


def contained_in(config: Any) -> Iterator[tuple[tuple[str, ...], Contained]]:
    """The plugins that a bound Config contains, with the steps to their fields, the innermost first."""
    for name in contained_fields(type(config)):
        contained = getattr(config, name)
        if isinstance(contained, Contained):
            yield from (((name, *steps), inner) for steps, inner in contained_in(contained.config))
            yield (name,), contained
