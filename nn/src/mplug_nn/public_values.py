"""The values that a field of a config.json may have, and how an error describes them. Data, without torch."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mplug.errors import brief

LARGEST = (1 << 63) - 1
"""The largest integer of a field that is read."""


@dataclass(frozen=True)
class Values:
    """Which values of a field are supported, and how an error describes them: 'an integer of at least 1'."""

    accepts: Callable[[Any], bool]
    text: str
    samples: tuple[Any, ...] = ()
    """Supported values that take different paths through a form's function; the suite for families tries them."""

    @property
    def or_null(self) -> "Values":
        """The same values, and null."""
        return Values(lambda value: value is None or self.accepts(value), f"{self.text}, or null", self.samples)

    @staticmethod
    def integer(least: int = 1, most: int | None = None) -> "Values":
        """Integers of at least `least`, and of at most `most` if there is a limit."""
        text = f"an integer of at least {least}" + (f" and at most {most}" if most is not None else "")
        limit = LARGEST if most is None else most
        return Values(lambda value: type(value) is int and least <= value <= limit, text)

    @staticmethod
    def positive() -> "Values":
        """Finite numbers above 0."""
        return Values(lambda value: _is_number(value) and value > 0, "a number above 0")

    @staticmethod
    def not_negative() -> "Values":
        """Finite numbers from 0 on."""
        return Values(lambda value: _is_number(value) and value >= 0, "a number of at least 0")

    @staticmethod
    def share() -> "Values":
        """Numbers from 0 to less than 1, such as the rate of dropout."""
        return Values(lambda value: _is_number(value) and 0 <= value < 1, "a number of at least 0 and less than 1")

    @staticmethod
    def flag() -> "Values":
        """true and false."""
        return Values(lambda value: isinstance(value, bool), "true or false", (True, False))

    @staticmethod
    def one_of(*allowed: Any) -> "Values":
        """These values."""
        words = " or ".join(json.dumps(one) for one in allowed)
        return Values(lambda value: any(same_value(value, one) for one in allowed), words, allowed)

    @staticmethod
    def mapping() -> "Values":
        """Mappings of any content, which the form's function checks."""
        return Values(lambda value: isinstance(value, dict), "a mapping")

    @staticmethod
    def indices() -> "Values":
        """Lists of numbers of blocks."""
        return Values(
            lambda value: isinstance(value, list) and all(type(one) is int and one >= 0 for one in value),
            "a list of integers of at least 0",
        )

    @staticmethod
    def divisors() -> "Values":
        """Lists of numbers above 0."""
        return Values(
            lambda value: isinstance(value, list) and all(_is_number(one) and one > 0 for one in value),
            "a list of numbers above 0",
        )

    @staticmethod
    def colours() -> "Values":
        """Three numbers, one for each colour."""
        return Values(
            lambda value: (
                isinstance(value, list | tuple) and len(value) == 3 and all(type(one) in (int, float) for one in value)
            ),
            "a list of three numbers",
        )

    @staticmethod
    def names() -> "Values":
        """Lists of names."""
        return Values(
            lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of names"
        )


def _is_number(value: Any) -> bool:
    return abs(value) <= LARGEST if type(value) is int else type(value) is float and math.isfinite(value)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal: 0 is 0.0, but not false."""
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)


def shown(value: Any) -> str:
    """A value of JSON for a sentence."""
    return brief(repr(value)) if isinstance(value, str) else brief(json.dumps(value))
