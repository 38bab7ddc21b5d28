"""Problems of the fields of a config, and checks of values that pydantic accepts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

NO_SECTION = "must be a section (a mapping of fields)"


@dataclass(frozen=True)
class Problem:
    """A problem of a field: the steps from the section to the field, and the message.

    `is_fault` means that a validator of the section raised an exception that does not refuse a value.
    """

    path: tuple[str, ...]
    message: str
    is_fault: bool = False

    @property
    def sentence(self) -> str:
        """The field and the message; the message alone if it is about several fields."""
        return f"{'.'.join(self.path)}: {self.message}" if self.path else self.message


def stated_problems(error: ValidationError) -> list[Problem]:
    """Every problem of a section, in the words of pydantic."""
    stated = error.errors(include_url=False)
    return [Problem(tuple(map(str, one["loc"])), " ".join(one["msg"].split())) for one in stated]


def booleans_as_numbers(raw: Any, bound: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """The path of every `true` or `false` in a section that was bound as 1 or 0, with a message.

    A boolean that was bound as another number is accepted: a validator of the section converted it on purpose.
    """
    if isinstance(raw, bool) and isinstance(bound, int | float) and not isinstance(bound, bool) and bound == raw:
        yield (), f"must be a valid {'integer' if isinstance(bound, int) else 'number'}, not {raw!r}"
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(raw, Mapping) and isinstance(bound, BaseModel):
        names = [(name, field.alias or name) for name, field in type(bound).model_fields.items()]
        pairs = [(alias, raw[alias], getattr(bound, name)) for name, alias in names if alias in raw]
    elif isinstance(raw, Mapping) and isinstance(bound, Mapping):
        pairs = [(name, inner, bound[name]) for name, inner in raw.items() if name in bound]
    elif isinstance(raw, list) and isinstance(bound, list | tuple) and len(raw) == len(bound):
        pairs = [(n, inner, bound[n]) for n, inner in enumerate(raw)]
    for name, raw_inner, bound_inner in pairs:
        for path, message in booleans_as_numbers(raw_inner, bound_inner):
            yield (str(name), *path), message
