"""The range of a config's numbers, whoever reads them: none is larger than the machine's own numbers.

A section that is bound may hold an integer of thirty digits, an infinity or 1e300, because its author thought of none.
Such a value reaches a kernel, a file or a loop hours later. The host therefore checks the values of every section,
also those of third parties, once they are bound.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from mplug.errors import quoted

LARGEST_INTEGER = 2**63 - 1
"""What a tensor's size, an index and a seed can be."""
LARGEST_NUMBER = 3.4028234663852886e38
"""The largest finite number of fp32, in which masters, moments and schedules are computed."""
Key = tuple[str, ...]


def out_of_range(config: BaseModel) -> Iterator[tuple[Key, str]]:
    """The path of every number of a bound section that is out of range, and the sentence about it.

    A field may be infinite where its default is, or where it says so: `Field(allow_inf_nan=True)`.
    """
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        default = None if field.is_required() else field.default
        if value is None or isinstance(value, bool | str) or (type(value) is type(default) and value == default):
            continue
        infinite = type(config).model_config.get("allow_inf_nan") is True or any(
            getattr(mark, "allow_inf_nan", None) is True for mark in field.metadata
        )
        for key, message in _of_value(value, infinite):
            yield (field.alias or name, *key), message


def integers_out_of_range(value: Any) -> Iterator[tuple[Key, str]]:
    """The same for the integers of values that are not bound yet."""
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
