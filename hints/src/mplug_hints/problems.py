"""Convert pydantic's errors about a section to messages about the fields that the user wrote.

A pydantic error gives its location as a list of steps: fields, indices and keys. It also contains steps of pydantic's
own, such as the member of a union ('constrained-int') or the tag of a discriminated union. A step that does not exist
in the section's values is pydantic's own and is not part of the field's name. The errors of all members of one union
become one message.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mplug.config.problems import NO_SECTION, Problem
from mplug.errors import listed, quoted, suggest

KEY = "[key]"
"""Pydantic's last step of an error about the key of a mapping."""
TYPES = {
    "model_type": NO_SECTION,
    "model_attributes_type": NO_SECTION,
    "dataclass_type": NO_SECTION,
    "dict_type": "must be a mapping",
    "mapping_type": "must be a mapping",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "set_type": "must be a list",
    "frozen_set_type": "must be a list",
    "int_parsing": "must be a valid integer",
    "int_parsing_size": "must be a valid integer",
    "int_from_float": "must be a valid integer",
    "float_parsing": "must be a valid number",
    "bool_parsing": "must be a valid boolean",
}
"""Messages for types of errors about which pydantic's own messages use Python's terms."""
LENGTHS = {"too_short": ("at least", "min_length"), "too_long": ("at most", "max_length")}
"""Types of errors about the length of a list: the words of the message, and where pydantic has the bound."""
MESSAGE_OF_AUTHOR = ("value_error", "assertion_error")
"""Types of errors whose message the author of the section wrote. It states the requirement on the value."""


@dataclass(frozen=True)
class _Located:
    """An error of pydantic with its steps; the flag of a step says whether the step exists in the section's values."""

    details: Any
    steps: tuple[tuple[Any, bool], ...]

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(str(step) for step, is_in_values in self.steps if is_in_values)


def problems_of(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]) -> list[Problem]:
    """Every problem of a section with these values."""
    located = [_Located(details, _steps(details, values)) for details in error.errors(include_url=False)]
    located = [one for one in located if not _only_misses_wrong_entries(one, located)]
    problems = [Problem(_field_of(error), _message(error, model)) for error in _join_unions(located, 0)]
    return list(dict.fromkeys(problems))


def _only_misses_wrong_entries(error: _Located, others: Iterable[_Located]) -> bool:
    """Whether a list is too short only because pydantic does not count its wrong entries, which have errors too."""
    path, actual = error.path, error.details["input"]
    if error.details["type"] != "too_short" or not hasattr(actual, "__len__"):
        return False
    within = any(len(one.path) > len(path) and one.path[: len(path)] == path for one in others)
    return within and len(actual) >= error.details["ctx"]["min_length"]


def _steps(details: Any, values: Any) -> tuple[tuple[Any, bool], ...]:
    """The steps of an error, each with whether it is one of the steps in `values` that lead to the wrong value."""
    location, missing = tuple(details["loc"]), details["type"] == "missing"
    inner, tail = (location[:-1], location[-1:]) if missing or _is_of_key(details) else (location, ())
    flags = None if _is_of_key(details) else _flags_to(details["input"], inner, values)
    if flags is None:
        flags = _existing_steps(inner, values)
    return (*zip(inner, flags, strict=True), *((step, missing) for step in tail))


def _is_of_key(details: Any) -> bool:
    """Whether the error is about the key of a mapping. A field that a user calls '[key]' gives the same last step."""
    location = details["loc"]
    return location[-1:] == (KEY,) and len(location) > 1 and bool(details["input"] == location[-2])


def _flags_to(target: Any, location: tuple[Any, ...], value: Any) -> tuple[bool, ...] | None:
    """Which steps lead from `value` to the object `target`, with as many steps as possible; None if no choice does."""
    if not location:
        return () if value is target else None
    inner = _step(value, location[0])
    if inner is not _NOWHERE and (flags := _flags_to(target, location[1:], inner)) is not None:
        return (True, *flags)
    flags = _flags_to(target, location[1:], value)
    return None if flags is None else (False, *flags)


def _existing_steps(location: tuple[Any, ...], value: Any) -> tuple[bool, ...]:
    """Which steps exist in `value`: the fallback for a validator that replaced the user's value by another object."""
    flags = []
    for step in location:
        inner = _step(value, step)
        flags.append(inner is not _NOWHERE)
        value = value if inner is _NOWHERE else inner
    return tuple(flags)


_NOWHERE = object()


def _step(value: Any, step: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(step, _NOWHERE)
    if isinstance(value, list | tuple) and isinstance(step, int) and not isinstance(step, bool):
        return value[step] if 0 <= step < len(value) else _NOWHERE
    return _NOWHERE


def _join_unions(errors: list[_Located], depth: int) -> list[_Located]:
    """The errors, with those of all members of a union joined to one; `depth` counts the steps handled so far."""
    if len(errors) < 2:
        return errors
    groups: dict[Any, list[_Located]] = {}
    for error in errors:
        groups.setdefault(error.steps[depth] if depth < len(error.steps) else None, []).append(error)
    joined = {key: _join_unions(group, depth + 1) if key is not None else group for key, group in groups.items()}
    members = [group for key, group in joined.items() if key is not None and not key[1]]
    of_union = _errors_of_union(members, depth) if len(members) > 1 else None
    if of_union is None:
        return [error for group in joined.values() for error in group]
    return [error for key, group in joined.items() if key is None or key[1] for error in group] + of_union


def _errors_of_union(members: list[list[_Located]], depth: int) -> list[_Located]:
    """The errors of the union's member that fits the value best; if none fits, one error that names all members.

    A member fits if only parts of the value are wrong.
    """
    outer = tuple(str(step) for step, is_in_values in members[0][0].steps[:depth] if is_in_values)
    fitting = [member for member in members if all(error.path != outer for error in member)]
    if fitting:
        return min(fitting, key=len)
    first = members[0][0]
    needs = dict.fromkeys(_requirement(error) for member in members for error in member if error.path == outer)
    message = " or ".join(need if not number else need.removeprefix("must be ") for number, need in enumerate(needs))
    joined = {**first.details, "type": "union", "msg": f"{message}, not {quoted(first.details['input'])}"}
    return [_Located(joined, first.steps)]


def _field_of(error: _Located) -> tuple[str, ...]:
    if error.details["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return (*error.path, *_discriminator(error.details))
    return error.path


def _discriminator(details: Any) -> tuple[str, ...]:
    """The field that selects the member of a union; empty if a function selects the member."""
    name = str(details["ctx"]["discriminator"]).partition(" | ")[0]
    return (name.strip("'"),) if name.startswith("'") else ()


def _requirement(error: _Located) -> str:
    """The requirement on the value ('must be a list'), without the value."""
    kind, message = error.details["type"], str(error.details["msg"])
    if kind in MESSAGE_OF_AUTHOR:
        return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind in LENGTHS:
        word, bound = LENGTHS[kind]
        number = error.details["ctx"][bound]
        return f"must have {word} {number} {'entry' if number == 1 else 'entries'}"
    text = TYPES.get(kind) or message.replace("Input should be", "must be").replace("String should", "must")
    return " ".join(text.split())


def _message(error: _Located, model: type[BaseModel]) -> str:
    kind, details = error.details["type"], error.details
    if kind == "extra_forbidden":
        fields = _fields(model, error.path[:-1])
        return f"unknown field{suggest(error.path[-1], fields)}" + (f" (fields: {listed(fields)})" if fields else "")
    if kind == "missing":
        missing = model.model_fields.get(error.path[0]) if len(error.path) == 1 else None
        return f"is required: {missing.description}" if missing and missing.description else "is required"
    if kind == "union_tag_not_found":
        return "is required, because it selects the other fields" if _discriminator(details) else _requirement(error)
    if kind == "union_tag_invalid":
        return f"must be {_alternatives(details['ctx']['expected_tags'])}, not {quoted(details['ctx']['tag'])}"
    if kind == "union":
        return str(details["msg"])
    if _is_of_key(details):
        return f"has the key {quoted(details['input'])}, but a key {_requirement(error)}"
    if kind in MESSAGE_OF_AUTHOR:
        return " ".join(_requirement(error).split())
    return f"{_requirement(error)}, not {quoted(details['input'])}"


def _alternatives(tags: str) -> str:
    head, _, last = tags.rpartition(", ")
    return f"{head} or {last}" if head else last


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a type consists of: those of an optional section, of a list of sections or of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def _fields(model: Any, path: Iterable[str]) -> list[str]:
    """The names of the fields of the section at a path, as a user writes them; empty if it is not a plain section."""
    is_list = False
    for name in path:
        if is_list and name.isdigit():
            is_list = False
            continue
        field = getattr(model, "model_fields", {}).get(name)
        found = set(_sections(field.annotation)) if field is not None else set()
        model = found.pop() if len(found) == 1 else None
        is_list = field is not None and get_origin(field.annotation) in (list, tuple)
    fields = {} if is_list else getattr(model, "model_fields", {})
    return sorted(field.alias or name for name, field in fields.items())
