"""What the host asks about a mistyped command line (`mplug.cli.hints.Hints`)."""

from collections.abc import Sequence
from pathlib import Path

import click
import yaml

from mplug_hints.options import option_hint, refuse_bare_fields
from mplug_hints.words import word_hint

OTHER_COMMANDS = Path(__file__).with_name("other_commands.yaml")
"""Commands of other tools, each with the command of mplug that does the same."""


class Hints:
    """The class of the entry-point group 'mplug.hints'."""

    def of_options(self, error: click.NoSuchOption, words: Sequence[str]) -> str:
        """The message for the unknown options among the words of a command line."""
        return option_hint(error, words)

    def of_word(self, word: str) -> str:
        """The message for a word that is no option, no assignment and no config file."""
        return word_hint(word)

    def of_command(self, command: str) -> str:
        """The command of mplug for the name of a command of another tool."""
        table: dict[str, str] = yaml.safe_load(OTHER_COMMANDS.read_text(encoding="utf-8"))
        return table.get(command, "")

    def refuse_bare_fields(self, assignments: Sequence[str], option: str) -> None:
        """Raise UsageError if an assignment names a field without its section."""
        refuse_bare_fields(assignments, option)
