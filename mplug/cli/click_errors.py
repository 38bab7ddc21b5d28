"""The errors of click about a command line, in the words of mplug's own errors."""

import re
from collections.abc import Sequence

import click

from mplug.cli.hints import option_hint
from mplug.errors import brief, listed, suggest


def message_of(error: click.UsageError, command: str, words: Sequence[str]) -> str:
    """What is wrong with the command line of 'mplug COMMAND', and what to do; `words` are those after COMMAND."""
    if isinstance(error, click.NoSuchOption) and (hint := option_hint(error, words)):
        return hint
    return f"{_problem(error)} (see {error.ctx.command_path if error.ctx else command} --help)"


def _problem(error: click.UsageError) -> str:
    if isinstance(error, click.NoSuchOption):
        return f"there is no option '{brief(error.option_name)}'{suggest(error.option_name, error.possibilities or ())}"
    if isinstance(error, click.BadOptionUsage):
        return f"{error.option_name} needs a value"
    if extra := re.search(r"extra arguments? \((.+)\)$", error.message):
        return f"'{brief(extra[1])}' belongs to no option"
    name = _name_of(error)
    if isinstance(error, click.MissingParameter):
        choices = error.param.type.choices if error.param and isinstance(error.param.type, click.Choice) else ()
        return f"{name} is missing" + (f"; it is one of {listed(map(str, choices))}" if choices else "")
    text = error.message.rstrip(".").replace("valid integer range", "valid integer").replace("float range", "number")
    text = text[:1].lower() + text[1:]
    return f"{name}: {text}" if name else text


def _name_of(error: click.UsageError) -> str:
    """The option (its longest form) or the argument that an error is about; empty if it is about neither."""
    parameter = getattr(error, "param", None)
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return "" if parameter is None else str(parameter.human_readable_name)
