"""What the host asks of the package that knows what a mistyped command line may have meant."""

from collections.abc import Sequence
from typing import Protocol

import click

from mplug.registry.entry_points import HINTS
from mplug.registry.provided import provided


class Hints(Protocol):
    """The methods of the class in the entry-point group 'mplug.hints'.

    The host calls them for words that it cannot read. Without an installed class, its messages name the nearest option
    or command, and no form of another tool.
    """

    def of_options(self, error: click.NoSuchOption, words: Sequence[str]) -> str:
        """The message for the unknown options among the words of a command line; '' if click's own is better."""

    def of_word(self, word: str) -> str:
        """The message for a word that is no option, no assignment and no config file; '' if nothing is known of it."""

    def of_command(self, command: str) -> str:
        """The command of mplug for the name of a command of another tool; '' if there is none."""

    def refuse_bare_fields(self, assignments: Sequence[str], option: str) -> None:
        """Raise UsageError if an assignment names a field without its section, as in 'steps=10'."""


def hints() -> Hints | None:
    """The installed class, or None."""
    found: Hints | None = provided(HINTS)
    return found


def assignment_hint(assignments: Sequence[str], option: str = "--set ") -> None:
    """Raise UsageError, with the remedy, if an assignment names a field without its section, as in 'steps=10'."""
    if assignments and (found := hints()) is not None:
        found.refuse_bare_fields(assignments, option)
