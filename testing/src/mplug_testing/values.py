"""Other valid values of a config's field, derived from its type."""

import math
import types
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mplug.registry.open_lists import OpenList

NUMBERS = (0, 1, 2, 3, 4, 8, 16)
"""Integers to try for a field whose current value is None."""


def other_values(annotation: Any, metadata: Sequence[Any], current: Any) -> Iterator[Any]:
    """Values of a field's type that differ from its current value, the nearest first.

    They satisfy the bounds in the annotation. Nothing can be derived for text, for mappings and for nested models,
    unless their type names the values (`Literal`, an open list).
    """
    seen = [(isinstance(current, bool), _plain(current))]  # True equals 1, and is another value
    for value in _values(annotation, metadata, current):
        if (isinstance(value, bool), value) not in seen:
            seen.append((isinstance(value, bool), value))
            yield value


def _plain(value: Any) -> Any:
    """A value as a config file holds it."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _values(annotation: Any, metadata: Sequence[Any], current: Any) -> Iterator[Any]:
    origin, inner = get_origin(annotation), get_args(annotation)
    named = next((one for one in metadata if _open_list(one) is not None), None)
    if named is not None:
        yield from _open_list(named).names()  # type: ignore[union-attr]
    elif origin is Annotated:
        yield from _values(inner[0], [*metadata, *inner[1:]], current)
    elif origin in (Union, types.UnionType):
        for arm in inner:
            yield from _values(arm, metadata, current)
    elif annotation in (None, type(None)):
        yield None
    elif origin is Literal:
        yield from inner
    elif annotation is bool:
        yield from (False, True)
    elif annotation in (int, float):
        yield from (number for number in _numbers(annotation, current) if _within(number, metadata))
    elif origin in (tuple, list, Sequence) and inner:
        yield from _sequences(inner[0], current)


def _open_list(mark: Any) -> OpenList | None:
    """The list of names that a validator checks; None for every other mark in an annotation."""
    owner = getattr(getattr(mark, "func", None), "__self__", None)
    return owner if isinstance(owner, OpenList) else None


def _numbers(kind: type, current: Any) -> Iterator[int | float]:
    if not isinstance(current, int | float) or isinstance(current, bool):
        yield from map(kind, NUMBERS[1:])
        return
    near = (current + 1, current * 2, current - 1, current // 2) if kind is int else (current * 2, current / 2)
    yield from (kind(number) for number in near)
    yield from map(kind, NUMBERS) if kind is int else iter((0.5, 0.25, 0.75, 1.0, 0.0))


def _within(number: float, metadata: Sequence[Any]) -> bool:
    """Whether a number keeps the bounds in an annotation (of `annotated_types`, or of pydantic's `Field`)."""
    bounds = {"ge": 0, "gt": 0, "le": 0, "lt": 0, "multiple_of": 0}
    for mark in metadata:
        for name in bounds:
            bound = getattr(mark, name, None)
            if bound is not None and not _keeps(name, number, bound):
                return False
    return math.isfinite(number)


def _keeps(name: str, number: float, bound: float) -> bool:
    return {
        "ge": number >= bound,
        "gt": number > bound,
        "le": number <= bound,
        "lt": number < bound,
        "multiple_of": bound == 0 or number % bound == 0,
    }[name]


def _sequences(item: Any, current: Any) -> Iterator[list[Any]]:
    """Sequences of one or two items whose values the item's type names; `...` of a tuple counts as any length."""
    items = list(dict.fromkeys(_values(item, (), None)))
    yield from ([one] for one in items)
    yield from map(list, product(items, repeat=2))
    if isinstance(current, list | tuple) and len(current) > 1:
        yield list(current)[:-1]
