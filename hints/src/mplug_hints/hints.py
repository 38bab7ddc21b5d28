"""What the host asks about a mistyped command line (`mplug.cli.hints.Hints`)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from mplug_hints.click_errors import message_of
from mplug_hints.options import refuse_bare_fields
from mplug_hints.words import word_hint

if TYPE_CHECKING:
    from mplug.config.problems import Problem

OTHER_COMMANDS = Path(__file__).with_name("other_commands.yaml")
"""Commands of other tools, each with the command of mplug that does the same."""


class Hints:
    """The class of the entry-point group 'mplug.hints'."""

    def of_line(self, error: click.UsageError, command: str, words: Sequence[str]) -> str:
        """What is wrong with the command line of a command, and what to do."""
        return message_of(error, command, words)

    def before_binding(self, values: Mapping[str, Any]) -> "list[Problem]":
        """Integers of a section that are out of range."""
        from mplug.config.problems import Problem  # imports pydantic
        from mplug_hints.ranges import integers_out_of_range

        return [Problem(path, message) for path, message in integers_out_of_range(values)]

    def after_binding(self, values: Mapping[str, Any], config: Any) -> "list[Problem]":
        """Numbers of a bound section that are out of range, or that the user wrote as booleans."""
        from mplug.config.problems import Problem  # imports pydantic
        from mplug_hints.ranges import booleans_as_numbers, out_of_range

        checks = (*booleans_as_numbers(values, config), *out_of_range(config))
        return [Problem(path, message) for path, message in checks]

    def contradictions(self, config: Any, rate: Any) -> Iterator[str]:
        """Contradictions between settings of the host."""
        from mplug_hints.contradictions import contradictions  # imports pydantic

        return contradictions(config, rate)

    def of_section(self, error: Any, model: Any, values: Mapping[str, Any]) -> "list[Problem]":
        """Every problem of a section of the config, as errors about the fields that the user wrote."""
        from mplug_hints.problems import problems_of  # imports pydantic

        return problems_of(error, model, values)

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
