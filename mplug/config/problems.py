"""What pydantic finds wrong with a section, as sentences about the fields that the user wrote.

A pydantic error names a place by steps: fields, indices and keys, but also steps of its own, such as the members of a
union ('constrained-int') or the tag of a discriminated one. A step that leads nowhere in the section's values is
pydantic's own and is no part of the field's name. The members of a union give one sentence.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from mplug.errors import listed, quoted, suggest

KEY = "[key]"
"""Pydantic's last step for a key of a mapping that is not of its type."""
TYPES = {
    "model_type": "must be a section with fields of its own",
    "model_attributes_type": "must be a section with fields of its own",
    "dataclass_type": "must be a section with fields of its own",
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
"""Our words for types of problems, where pydantic's are about Python."""
OWN_WORDS = ("value_error", "assertion_error")
"""Problems whose message the author of the section wrote: it says what it needs of the value."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a field: the steps to it in the section, and the sentence about it.

    `is_fault` says that the code of the section's author raised something that is no refusal.
    """

    path: tuple[str, ...]
    message: str
    is_fault: bool = False


@dataclass(frozen=True)
class _Found:
    """An error of pydantic: its steps, each with whether it is a step in the section's values."""

    error: Any
    steps: tuple[tuple[Any, bool], ...]

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(str(step) for step, is_own in self.steps if is_own)


def problems_of(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]) -> list[Problem]:
    """Every problem of a section with these values."""
    found = [_Found(one, _steps(one, values)) for one in error.errors(include_url=False)]
    told = [Problem(_place(one), _sentence(one, model)) for one in _without_unions(found, 0)]
    return list(dict.fromkeys(told))


def booleans_as_numbers(said: Any, bound: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """The path of every `true` or `false` of a section that is bound as 1 or 0, with a sentence.

    A validator of the section's author may turn a boolean into any other number.
    """
    if isinstance(said, bool) and isinstance(bound, int | float) and not isinstance(bound, bool) and bound == said:
        yield (), f"must be a valid {'integer' if isinstance(bound, int) else 'number'}, not {said!r}"
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(said, Mapping) and isinstance(bound, BaseModel):
        named = [(name, field.alias or name) for name, field in type(bound).model_fields.items()]
        pairs = [(alias, said[alias], getattr(bound, name)) for name, alias in named if alias in said]
    elif isinstance(said, Mapping) and isinstance(bound, Mapping):
        pairs = [(name, inner, bound[name]) for name, inner in said.items() if name in bound]
    elif isinstance(said, list) and isinstance(bound, list | tuple) and len(said) == len(bound):
        pairs = [(n, inner, bound[n]) for n, inner in enumerate(said)]
    for name, one, other in pairs:
        for path, message in booleans_as_numbers(one, other):
            yield (str(name), *path), message


def _steps(error: Any, values: Any) -> tuple[tuple[Any, bool], ...]:
    """The error's steps, each with whether the user wrote it: those that lead to the value that is wrong."""
    location, missing = tuple(error["loc"]), error["type"] == "missing"
    inner, tail = (location[:-1], location[-1:]) if missing or _is_of_key(error) else (location, ())
    chosen = None if _is_of_key(error) else _leading(inner, values, error["input"])
    if chosen is None:
        chosen = _greedy(inner, values)
    return (*zip(inner, chosen, strict=True), *((step, missing) for step in tail))


def _is_of_key(error: Any) -> bool:
    """Whether the error is about a mapping's key; a user may call a field '[key]', too."""
    return error["loc"][-1:] == (KEY,) and len(error["loc"]) > 1 and bool(error["input"] == error["loc"][-2])


def _leading(location: tuple[Any, ...], value: Any, target: Any) -> tuple[bool, ...] | None:
    """Which steps to take so that they lead to `target` itself, as many as possible; None where no choice does."""
    if not location:
        return () if value is target else None
    inner = _step(value, location[0])
    if inner is not _NOWHERE and (rest := _leading(location[1:], inner, target)) is not None:
        return (True, *rest)
    rest = _leading(location[1:], value, target)
    return None if rest is None else (False, *rest)


def _greedy(location: tuple[Any, ...], value: Any) -> tuple[bool, ...]:
    """Take every step that leads somewhere; a validator may have put another value in the place of the user's."""
    taken = []
    for step in location:
        inner = _step(value, step)
        taken.append(inner is not _NOWHERE)
        value = value if inner is _NOWHERE else inner
    return tuple(taken)


_NOWHERE = object()


def _step(value: Any, step: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(step, _NOWHERE)
    if isinstance(value, list | tuple) and isinstance(step, int) and not isinstance(step, bool):
        return value[step] if 0 <= step < len(value) else _NOWHERE
    return _NOWHERE


def _without_unions(found: list[_Found], depth: int) -> list[_Found]:
    """One problem for each union, in place of those of each of its members."""
    if len(found) < 2:
        return found
    groups: dict[Any, list[_Found]] = {}
    for one in found:
        groups.setdefault(one.steps[depth] if depth < len(one.steps) else None, []).append(one)
    kept = {key: _without_unions(group, depth + 1) if key is not None else group for key, group in groups.items()}
    members = [group for key, group in kept.items() if key is not None and not key[1]]
    chosen = _chosen_member(members, depth) if len(members) > 1 else None
    if chosen is None:
        return [one for group in kept.values() for one in group]
    return [one for key, group in kept.items() if key is None or key[1] for one in group] + chosen


def _chosen_member(members: list[list[_Found]], depth: int) -> list[_Found]:
    """The problems of the union's member that the value nearly is; where it is none, one problem that names all."""
    outer = tuple(str(step) for step, is_own in members[0][0].steps[:depth] if is_own)
    near = [member for member in members if all(one.path != outer for one in member)]
    if near:
        return min(near, key=len)
    first = members[0][0]
    words = dict.fromkeys(_words(one) for member in members for one in member if one.path == outer)
    message = " or ".join(word if not number else word.removeprefix("must be ") for number, word in enumerate(words))
    joined = {**first.error, "type": "union", "msg": f"{message}, not {quoted(first.error['input'])}"}
    return [_Found(joined, first.steps)]


def _place(one: _Found) -> tuple[str, ...]:
    if one.error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return (*one.path, *_discriminator(one.error))
    return one.path


def _discriminator(error: Any) -> tuple[str, ...]:
    """The field that says which member of a union is meant; none where a function finds it out."""
    name = str(error["ctx"]["discriminator"]).partition(" | ")[0]
    return (name.strip("'"),) if name.startswith("'") else ()


def _words(one: _Found) -> str:
    """What the value must be, without the value."""
    kind, message = one.error["type"], str(one.error["msg"])
    if kind in OWN_WORDS:
        return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    words = TYPES.get(kind) or message.replace("Input should be", "must be").replace("String should", "must")
    return " ".join(words.split())


def _sentence(one: _Found, model: type[BaseModel]) -> str:
    kind, error = one.error["type"], one.error
    if kind == "extra_forbidden":
        fields = _fields(model, one.path[:-1])
        return f"unknown field{suggest(one.path[-1], fields)}" + (f" (fields: {listed(fields)})" if fields else "")
    if kind == "missing":
        missing = model.model_fields.get(one.path[0]) if len(one.path) == 1 else None
        return f"is required: {missing.description}" if missing and missing.description else "is required"
    if kind == "union_tag_not_found":
        return "is required: it says which fields follow" if _discriminator(error) else _words(one)
    if kind == "union_tag_invalid":
        return f"must be {_alternatives(error['ctx']['expected_tags'])}, not {quoted(error['ctx']['tag'])}"
    if kind == "union":
        return str(error["msg"])
    if _is_of_key(error):
        return f"has the key {quoted(error['input'])}, and a key {_words(one)}"
    if kind in OWN_WORDS:
        return " ".join(_words(one).split())
    return f"{_words(one)}, not {quoted(error['input'])}"


def _alternatives(tags: str) -> str:
    head, _, last = tags.rpartition(", ")
    return f"{head} or {last}" if head else last


def _fields(model: Any, path: Iterable[str]) -> list[str]:
    """The fields of the section at a path, by the names that a user writes; none where it is not a plain section."""
    for name in path:
        described = getattr(model, "model_fields", {}).get(name)
        model = described.annotation if described is not None else None
    named = getattr(model, "model_fields", {})
    return sorted(described.alias or name for name, described in named.items())
