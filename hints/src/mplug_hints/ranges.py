"""Check the range of the numbers in a config: integers of at most 63 bits, floats within the range of fp32.

The type of a field often admits an integer of thirty digits, an infinity or 1e300. Such a value would reach a kernel, a
file or a loop hours later. The host therefore checks the bound values of every section, including third-party ones.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mplug.errors import quoted

LARGEST_INTEGER = 2**63 - 1
"""The largest size of a tensor, index and seed."""
LARGEST_NUMBER = 3.4028234663852886e38
"""The largest finite number of fp32, in which masters, moments and schedules are computed."""
Key = tuple[str, ...]


def out_of_range(config: BaseModel) -> Iterator[tuple[Key, str]]:
    """The path of every number of a bound section that the user set and that is out of range, with a message.

    A field may be infinite if its default is infinite, or if its type admits it: `Field(allow_inf_nan=True)`.
    """
    everywhere = type(config).model_config.get("allow_inf_nan") is True
    for name, field in type(config).model_fields.items():
        if name not in config.model_fields_set:
            continue
        value = getattr(config, name)
        problems = [*_of_value(value, everywhere or _may_be_infinite(field.annotation, field.metadata))]
        if problems and not _is_default(value, field, config):
            yield from (((field.alias or name, *key), message) for key, message in problems)


def _may_be_infinite(annotation: Any, marks: Iterable[Any]) -> bool:
    """Whether a field's type admits infinity, or a type inside it: a member of a union, the entries of a tuple."""
    for mark in marks:
        inner = mark.metadata if isinstance(mark, FieldInfo) else [mark]
        if any(getattr(constraint, "allow_inf_nan", None) is True for constraint in inner):
            return True
    return any(_may_be_infinite(inner, getattr(inner, "__metadata__", ())) for inner in get_args(annotation))


def _is_default(value: Any, field: FieldInfo, config: BaseModel) -> bool:
    """Whether a field has its default value. A saved config states defaults like all other values."""
    if field.is_required():
        return False
    needs_data = getattr(field, "default_factory_takes_validated_data", False)  # pydantic 2.10 and later
    arguments = {"validated_data": dict(config.__dict__)} if needs_data else {}
    default = field.get_default(call_default_factory=True, **arguments)
    return type(value) is type(default) and bool(value == default)


def integers_out_of_range(value: Any) -> Iterator[tuple[Key, str]]:
    """The path of every integer that is out of range in values that are not bound yet, with a message."""
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        yield (), f"must be an integer of at most 63 bits ({LARGEST_INTEGER}), not {quoted(value)}"
    for name, inner in _parts(value):
        for key, message in integers_out_of_range(inner):
            yield (name, *key), message


def _of_value(value: Any, infinite: bool) -> Iterator[tuple[Key, str]]:
    if isinstance(value, BaseModel):
        yield from out_of_range(value)
    elif isinstance(value, int):
        yield from integers_out_of_range(value)
    elif isinstance(value, float):
        if not math.isfinite(value) and not infinite:
            yield (), f"must be a finite number, not {value!r}"
        elif math.isfinite(value) and abs(value) > LARGEST_NUMBER:
            yield (), f"must be a number within the range of fp32 ({LARGEST_NUMBER:.3g}), not {value!r}"
    for name, inner in _parts(value):
        for key, message in _of_value(inner, infinite):
            yield (name, *key), message


def _parts(value: Any) -> list[tuple[str, Any]]:
    """The values inside a mapping or a list, each with its step."""
    if isinstance(value, Mapping):
        return [(str(name), inner) for name, inner in value.items()]
    return [(str(n), inner) for n, inner in enumerate(value)] if isinstance(value, list | tuple) else []


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
