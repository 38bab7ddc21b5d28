"""The table of a config.json: each of its fields is read, fixed, or has no effect. Data, without torch.

A family states one `PublicForm` for each kind of config.json that it reads and writes. The format 'huggingface' reads
every config.json through this table, so a field is honoured or refused, and never overlooked.
"""

import json
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from mplug.errors import brief, listed, suggest
from mplug_nn.public_rows import FixedField, ReadField, SumField, UnusedField
from mplug_nn.public_values import same_value, shown
from mplug_pretrained.described import PublicSettings

POSITIONS = ("rope_theta", "rope_scaling")
"""Settings that a user may change to train on longer sequences than those that the model was made for."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields with numbers of tokens, which the tokenizer's files state."""


def _nothing(_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class FormField:
    """A field whose value is a mapping, which a form of its own describes. Absent, all of its fields are absent.

    `under` is the setting that receives the mapping's settings as a section; empty: they are settings of the family's
    Config itself. With `altering`, a user may set null: what the trained model computes is then not what the folder
    describes. `write(config)` returns the fields that this section does not decide. `others` are the
    forms of mappings with another `model_type`; an export writes the first form whose `implied` settings the section
    has.
    """

    form: "PublicForm"
    under: str = ""
    altering: bool = False
    write: Callable[[Any], Mapping[str, Any]] = _nothing
    others: "tuple[PublicForm, ...]" = ()

    @property
    def forms(self) -> "tuple[PublicForm, ...]":
        """All forms of the mapping."""
        return (self.form, *self.others)

    def form_of(self, given: Mapping[str, Any]) -> "PublicForm":
        """The form of a mapping: without `others` the only one, else that of its `model_type`. Raises ValueError."""
        return form_of(self.forms, {"model_type": self.form.model_type, **given}) if self.others else self.form

    def written(self, name: str, config: Any) -> dict[str, Any]:
        """The mapping that a config of the family has for this field. Raises ValueError if it lacks the section."""
        own = getattr(config, self.under) if self.under else config
        if own is None:
            raise ValueError(f"it has the field '{name}', and model.{self.under} is null")
        fitting = [
            form for form in self.forms if all(getattr(own, one) == value for one, value in form.implied.items())
        ]
        form = fitting[0] if fitting else self.form  # the form that is read back then refuses the section
        return {**form.written(own), **self.write(config)}


@dataclass(frozen=True)
class FoundFamily:
    """The config.json of a family in another one: the word that names the family, its Config, and what it states."""

    name: str
    config: Any
    settings: PublicSettings


@dataclass(frozen=True)
class FamilyField:
    """A field whose value is the config.json of another family, which the setting `under` contains (`mplug.Family`).

    `mplug_nn.family_field` makes one. The form's functions see a `FoundFamily` as the value. `read` and `write` convert
    between a mapping and the family; both raise ValueError.
    """

    under: str
    read: Callable[[Mapping[str, Any]], FoundFamily]
    write: Callable[[Any], Mapping[str, Any]]


PublicField = ReadField | FixedField | SumField | UnusedField | FormField | FamilyField
"""A row of the table."""


@dataclass(frozen=True, kw_only=True)
class PublicForm:
    """A kind of config.json: all of its fields, and how they become the section 'model' and the reverse.

    `fields` has every field of the library's configuration class, of older and of newer releases; a field that is not
    in it is refused. `aliases` are other names of fields: {'num_experts': 'num_local_experts'}. `settings` computes
    what several fields decide together, from the values of all fields that are read. `write` is its inverse: from the
    family's Config, the fields that no setting decides alone; it may also write one that a setting decides. `implied`
    are settings that the form does not state. `training` and `altering` are settings without a field (see
    `PublicSettings`), with the values that the form implies; `POSITIONS` are altering too, with their fields. `longest`
    is the field with the length of the longest sequence. If `settings` returns a section that a `FormField` fills, both
    are merged. `flat` is a `FormField` whose fields older folders have beside it; both may be there if they are equal.
    `preparation` has the forms of further files of the folder, by their names, that say how media are prepared
    (preprocessor_config.json). Their settings are merged too, if the folder has these files; nothing writes them. They
    overrule settings that are `presumed`, which a folder without these files gets.

    An export reads what `write` returns through the same table. If this gives another model, the form cannot express
    the config, and the export is refused. So `write` cannot lose a setting, and needs no checks of its own.
    """

    architecture: str
    model_type: str
    fields: Mapping[str, PublicField]
    aliases: Mapping[str, str] = field(default_factory=dict)
    settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _nothing
    write: Callable[[Any], Mapping[str, Any]] = _nothing
    implied: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    altering: Mapping[str, Any] = field(default_factory=dict)
    longest: str | None = None
    flat: str | None = None
    preparation: "Mapping[str, PublicForm]" = field(default_factory=dict)
    presumed: Container[str] = ()

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The checked values of all fields that are read. Raises ValueError with one sentence."""
        given = self._nested(self._without_aliases(given))
        if unknown := sorted(name for name in given if name not in self.fields):
            raise ValueError(self._unknown(unknown))
        found: dict[str, Any] = {}
        for name, row in self.fields.items():
            if isinstance(row, ReadField):
                found[name] = self._read(row, name, given)
            elif isinstance(row, FormField):
                found[name] = self._values_in(row, name, given.get(name, {}))
            elif isinstance(row, FamilyField):
                found[name] = _family_in(row, name, given.get(name, {}))
            elif isinstance(row, FixedField):
                problem = row.check(name, given.get(name, row.default))
                if problem is not None:
                    raise ValueError(problem if name in given else f"it lacks the field '{name}': {problem}")
        for name, row in self.fields.items():
            if isinstance(row, SumField):
                self._check_sum(row, name, given, found)
        return found

    def read(self, given: Mapping[str, Any]) -> PublicSettings:
        """The settings that a config.json describes. Raises ValueError with one sentence."""
        return self.settings_of(self.values(given))

    def read_preparation(self, found: PublicSettings, file: str, given: Mapping[str, Any]) -> PublicSettings:
        """The settings `found` so far with those of a `file` of `preparation`. Raises ValueError with one sentence.

        A setting of several files must have the same value in all of them.
        """
        fixed, altering = {**found.fixed}, {**found.altering}
        for section, values in self.preparation[file].read(given).fixed.items():
            settings = fixed if section in fixed else altering
            own = settings[section]
            for name, value in values.items():
                if name in own and name not in self.presumed and not same_value(own[name], value):
                    raise ValueError(
                        f"its {file} has {shown(value)} for 'model.{section}.{name}', which is {shown(own[name])} by "
                        f"another file"
                    )
            settings[section] = {**own, **values}
        return replace(found, fixed=fixed, altering=altering)

    def settings_of(self, values: Mapping[str, Any]) -> PublicSettings:
        """The settings that the values of all fields describe. Raises ValueError if they do not fit together."""
        fixed, free = {**self.implied}, {**self.training}
        for name, row in self.fields.items():
            if isinstance(row, ReadField) and row.settings:
                value = values[name] if row.ours is None else row.ours[values[name]]
                (free if row.training else fixed).update(dict.fromkeys(row.settings, value))
        altering, longest = dict(self.altering), values[self.longest] if self.longest is not None else None
        for name, row in self.fields.items():
            if isinstance(row, FamilyField):
                of_family: FoundFamily = values[name]
                inside = of_family.settings
                fixed[row.under] = {"name": of_family.name, **inside.altering, **inside.free, **inside.fixed}
                longest = inside.longest if longest is None else longest
            if not isinstance(row, FormField):
                continue
            with _naming(name):
                own = getattr(values[name], "form", row.form).settings_of(values[name])
            if row.under:
                section = {**own.altering, **own.free, **own.fixed}
                (altering if row.altering else fixed)[row.under] = section
            else:
                fixed, free, altering = {**fixed, **own.fixed}, {**free, **own.free}, {**altering, **own.altering}
                longest = own.longest if longest is None else longest
        for name, value in self.settings(values).items():
            holder = next((one for one in (fixed, altering) if isinstance(one.get(name), Mapping)), None)
            if holder is None or not isinstance(value, Mapping):
                fixed[name] = value
            else:
                holder[name] = {**holder[name], **value}
        altering |= {name: fixed.pop(name) for name in POSITIONS if name in fixed}
        return PublicSettings(fixed, free, altering, longest)

    def written(self, config: Any) -> dict[str, Any]:
        """The config.json of a family's Config; `mplug_nn.written_config` checks that it reads as the same model."""
        own = self.write(config)
        rows = {
            name: row
            for name, row in self.fields.items()
            if isinstance(row, FormField) or (isinstance(row, ReadField) and row.settings)
        }
        families = {name: row for name, row in self.fields.items() if isinstance(row, FamilyField)}
        return {
            **({"architectures": [self.architecture]} if self.architecture else {}),
            "model_type": self.model_type,
            **{name: None for name in TOKENS if name in self.fields},  # the library's defaults are of other tokenizers
            **{name: row.written(name, config) for name, row in rows.items() if name not in own},
            **{name: row.write(getattr(config, row.under)) for name, row in families.items()},
            **own,
        }

    def with_fields(self, **rows: PublicField) -> "PublicForm":
        """The form with further rows, or with others."""
        return replace(self, fields={**self.fields, **rows})

    def _without_aliases(self, given: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in given.items() if name not in self.aliases}
        for alias, name in self.aliases.items():
            if alias not in given:
                continue
            if name in found and not same_value(found[name], given[alias]):
                raise ValueError(
                    f"its fields '{name}' and '{alias}' are one, but have the values {shown(found[name])} and "
                    f"{shown(given[alias])}"
                )
            found[name] = given[alias]
        return found

    def _nested(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields, with those of the mapping `flat` in the mapping."""
        row = self.fields.get(self.flat or "")
        if not isinstance(row, FormField):
            return given
        beside = [name for name in given if name not in self.fields and any(form.has(name) for form in row.forms)]
        inside = given.get(str(self.flat))
        if isinstance(inside, Mapping):
            for name in beside:
                if name not in inside or not same_value(inside[name], given[name]):
                    raise ValueError(f"its field '{name}' is another one than in its field '{self.flat}'")
            return {name: value for name, value in given.items() if name not in beside}
        moved = {name: given[name] for name in beside}
        kept = {name: value for name, value in given.items() if name not in beside}
        return {**kept, str(self.flat): moved} if inside is None else given

    def has(self, name: str) -> bool:
        """Whether a field has a row, or is another name of one that has."""
        return name in self.fields or name in self.aliases

    def _values_in(self, row: FormField, name: str, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise ValueError(f"its field '{name}' is {shown(given)}, but must be a mapping")
        with _naming(name):
            form = row.form_of(given)
            return NestedValues(form.values(given), form)

    def _unknown(self, names: list[str]) -> str:
        several = len(names) > 1
        own = [name for name, row in self.fields.items() if not isinstance(row, UnusedField)]
        near = "" if several else suggest(names[0], own)
        return (
            f"its {'fields' if several else 'field'} {listed(repr(brief(name)) for name in names[:8])} "
            f"{'are' if several else 'is'} unknown to the family, and could change what the model computes{near}"
        )

    def _read(self, row: ReadField, name: str, given: Mapping[str, Any]) -> Any:
        if name not in given:
            if row.required:
                raise ValueError(f"it lacks the field '{name}'")
            return row.default
        problem = row.check(name, given[name])
        if problem is not None:
            raise ValueError(problem)
        return given[name]

    def _check_sum(self, row: SumField, name: str, given: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        value = given.get(name, row.default)
        if value is None and (row.or_null or name not in given):
            return
        total = sum(found[one] for one in row.names)
        if not same_value(value, total):
            state = "is" if name in given else "is absent, which means"
            raise ValueError(
                f"its field '{name}' {state} {shown(value)}, but the family supports {total} only, which is "
                f"{' + '.join(row.names)}"
            )


class NestedValues(dict[str, Any]):
    """The values of a mapping in a config.json, and the form that describes them."""

    def __init__(self, values: Mapping[str, Any], form: PublicForm) -> None:
        super().__init__(values)
        self.form = form


def _family_in(row: FamilyField, name: str, given: Any) -> FoundFamily:
    """What a mapping says of the family inside. Raises ValueError."""
    if not isinstance(given, dict):
        raise ValueError(f"its field '{name}' is {shown(given)}, but must be a mapping")
    with _naming(name):
        return row.read(given)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors in the block name the field whose mapping is read."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"in its field '{name}', {error}") from None


def form_of(forms: tuple[PublicForm, ...], given: Mapping[str, Any]) -> PublicForm:
    """The form of a config.json, by its `model_type` and its `architectures`. Raises ValueError.

    Several forms may have one `model_type`: models with different heads. The first counts if none is named.
    """
    kind, architectures = given.get("model_type"), given.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    by_name = [form for form in forms if form.architecture in named]
    if kind is None:
        if len(by_name) != 1:
            raise ValueError(f"it lacks the field 'model_type' ({listed(form.model_type for form in forms)})")
        return by_name[0]
    of_kind = [form for form in forms if same_value(kind, form.model_type)]
    if by_name and of_kind and not any(form in by_name for form in of_kind):
        raise ValueError(f"its field 'model_type' is {shown(kind)}, but 'architectures' is {shown(named)}")
    for form in of_kind:
        if not by_name or form in by_name:
            return form
    words = " or ".join(json.dumps(kind) for kind in dict.fromkeys(form.model_type for form in forms))
    raise ValueError(f"its field 'model_type' is {shown(kind)}, but the family supports {words} only")
