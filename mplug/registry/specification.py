"""Markers for the specifications of hooks, and the table of all specifications. Imports no pluggy, as help needs none.

`mplug.hookspecs` fills the table when the package `mplug` is imported.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
Answers = Literal["all", "at most one", "exactly one"]

SPECIFICATIONS: dict[str, Callable[..., Any]] = {}
"""Every hook by name, in the order of a run."""
CONSTANTS: set[str] = set()
"""The hooks that a plugin may answer by a class attribute: `captures = True`."""


def _answered_by(answers: Answers) -> Callable[[F], F]:
    def mark(function: F) -> F:
        function.answers = answers  # type: ignore[attr-defined]
        SPECIFICATIONS[function.__name__] = function
        return function

    return mark


def or_attribute(function: F) -> F:
    """Allow a plugin whose answer is constant to state it as a class attribute with the hook's name."""
    CONSTANTS.add(function.__name__)
    return function


all_plugins = _answered_by("all")
at_most_one = _answered_by("at most one")
exactly_one = _answered_by("exactly one")


def hooks_answered_by(answers: Answers) -> list[str]:
    """The names of the hooks that take this many answers."""
    return [name for name, function in SPECIFICATIONS.items() if getattr(function, "answers") == answers]  # noqa: B009
