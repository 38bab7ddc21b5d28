"""What a plugin states about the fields of its Config, and checks of their values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mplug.errors import quoted


@dataclass(frozen=True)
class Mark:
    """A statement to the host about a field of a plugin's Config, in its annotation: `Annotated[int, MAY_CHANGE]`."""

    words: str


MAY_CHANGE = Mark("may change")
"""The field may differ when a run resumes: no loss, gradient or sample depends on it beyond rounding."""
MAY_MOVE = Mark("may change while the data stays the same")
"""The field of a data plugin may differ when a run resumes, provided that the loader's `fingerprint` is the same."""
OF_TRAINING = Mark("decides training only")
"""The field of an adapter plugin may differ in a new run that begins with adapters: they compute the same with it."""


def distinct(names: Sequence[Any] | None) -> Any:
    """The names of a list in a Config: ValueError if an entry occurs twice, because one of the two has no effect.

    For a field whose entries are names: `Annotated[tuple[str, ...], AfterValidator(distinct)]`.
    """
    for number, name in enumerate(names or ()):
        if name in (names or ())[:number]:
            raise ValueError(f"must have each name once, but has {quoted(name)} twice")
    return names
