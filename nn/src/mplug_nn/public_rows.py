"""Rows of the table of a config.json: fields that are read, fixed, sums of others, or without effect."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mplug.errors import listed
from mplug_nn.public_values import LARGEST, Values, same_value, shown


@dataclass(frozen=True)
class ReadField:
    """A field whose value the family uses.

    `default` is what the transformers library takes if the field is absent. Null is a value of its own: only `values`
    that accept it (`or_null`) allow it. `settings` are the fields of the family's Config that receive the value, after
    `ours` has translated it. The function `PublicForm.settings` reads a field that has no `settings`. With `training`,
    only training uses the value, so a user may set another one. With `required`, the library computes nothing with its
    default.
    """

    default: Any
    values: Values
    settings: tuple[str, ...] = ()
    ours: Mapping[Any, Any] | None = None
    training: bool = False
    required: bool = False

    def check(self, name: str, value: Any) -> str | None:
        """What is wrong with a value; None if it is supported."""
        if self.values.accepts(value):
            return None
        if type(value) is int and abs(value) > LARGEST:
            return f"its field '{name}' is an integer of {value.bit_length()} bits, which is too large"
        if self.values.text.startswith(("a ", "an ")):
            return f"its field '{name}' is {shown(value)}, but must be {self.values.text}"
        return f"its field '{name}' is {shown(value)}, but the family supports {self.values.text} only"

    def written(self, name: str, config: Any) -> Any:
        """The value that a config of the family has for this field. Raises ValueError if there is none."""
        found = [getattr(config, setting) for setting in self.settings]
        pairs = [(found[0], found[0])] if self.ours is None else list(self.ours.items())
        for theirs, ours in pairs:
            if all(same_value(ours, one) for one in found) and self.values.accepts(theirs):
                return theirs
        settings = listed(f"model.{one}={value!r}" for one, value in zip(self.settings, found, strict=True))
        raise ValueError(f"no value of '{name}' means {settings}")


@dataclass(frozen=True)
class FixedField:
    """A field of which the family supports some values only. `because` is the reason, which ends the refusal."""

    default: Any
    accepted: tuple[Any, ...]
    because: str = ""

    def check(self, name: str, value: Any) -> str | None:
        """What is wrong with a value; None if it is accepted."""
        if any(same_value(value, one) for one in self.accepted):
            return None
        words = " or ".join(json.dumps(one) for one in self.accepted)
        reason = f" ({self.because})" if self.because else ""
        return f"its field '{name}' is {shown(value)}, but the family supports {words} only{reason}"


@dataclass(frozen=True)
class SumField:
    """A field that repeats other fields: it must be the sum of their values. With `or_null`, it may be null, too.

    A `default` of None means that the field may be absent.
    """

    default: Any
    names: tuple[str, ...]
    or_null: bool = False


@dataclass(frozen=True)
class UnusedField:
    """A field without effect on what the model computes, for the reason `because`."""

    because: str
