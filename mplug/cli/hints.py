"""What the host asks of the package that knows what a mistyped command line may have meant."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import click

from mplug.registry.provided import provided

if TYPE_CHECKING:
    from mplug.config.problems import Problem


class Hints(Protocol):
    """The methods of the class in the entry-point group 'mplug.hints'.

    The host calls them for words that it cannot read, and for the values of every section. Without an installed class,
    its messages are those of click and pydantic, and values that no type refuses are accepted (`after_binding`).
    """

    def of_line(self, error: click.UsageError, command: str, words: Sequence[str]) -> str:
        """What is wrong with the command line of 'mplug COMMAND', and what to do; `words` are those after COMMAND."""

    def before_binding(self, values: Mapping[str, Any]) -> "list[Problem]":
        """Values of a section with which its validators must not compute: integers of thirty digits."""

    def after_binding(self, values: Mapping[str, Any], config: Any) -> "list[Problem]":
        """Values that a section has accepted and that cannot work: numbers out of range, booleans as numbers."""

    def contradictions(self, config: Any, rate: Any) -> Iterable[str]:
        """Contradictions between settings of the host; `rate` is the learning rate schedule that the config names."""

    def of_section(self, error: Any, model: Any, values: Mapping[str, Any]) -> "list[Problem]":
        """Every problem of a section with these values, from an error of pydantic about its `model`."""

    def of_word(self, word: str) -> str:
        """The message for a word that is no option, no assignment and no config file; '' if nothing is known of it."""

    def of_command(self, command: str) -> str:
        """The command of mplug for the name of a command of another tool; '' if there is none."""

    def refuse_bare_fields(self, assignments: Sequence[str], option: str) -> None:
        """Raise UsageError if an assignment names a field without its section, as in 'steps=10'."""


def hints() -> Hints | None:
    """The installed class, or None."""
    found: Hints | None = provided("hints")
    return found


def assignment_hint(assignments: Sequence[str], option: str = "--set ") -> None:
    """Raise UsageError, with the remedy, if an assignment names a field without its section, as in 'steps=10'."""
    if assignments and (found := hints()) is not None:
        found.refuse_bare_fields(assignments, option)
