"""The errors of click about a command line, in the words of mplug's own errors."""

import re
from collections.abc import Sequence

import click

from mplug.cli.options import PluginName
from mplug.errors import brief, listed, suggest
from mplug.registry.entry_points import Registry
from mplug_hints.options import option_hint


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
        return f"'{brief(extra[1])}' belongs to no option{_option_for(error, extra[1])}"
    name = _name_of(error)
    if isinstance(error, click.MissingParameter):
        choices = _choices(error.param)
        return f"{name} is missing" + (f"; it is one of {listed(choices)}" if choices else "")
    text = error.message.rstrip(".").replace("valid integer range", "valid integer").replace("float range", "number")
    text = text[:1].lower() + text[1:]
    if wrong := re.match(r"'(.+)' is not one of ", text):
        text += suggest(wrong[1], _choices(getattr(error, "param", None)))
    return f"{name}: {text}" if name else text


def _choices(parameter: click.Parameter | None) -> list[str]:
    """The values that a parameter may have, if they are words or names of installed plugins."""
    kind = parameter.type if parameter else None
    if isinstance(kind, PluginName):
        return list(Registry.of_process().names(kind.kind))
    return [str(choice) for choice in kind.choices] if isinstance(kind, click.Choice) else []


def _option_for(error: click.UsageError, word: str) -> str:
    """'; use --prompt '...'', if the first option of the command that takes any text shows how a value is given."""
    parameters = error.ctx.command.params if error.ctx else []
    texts = [
        one for one in parameters if isinstance(one, click.Option) and one.type is click.STRING and not one.is_flag
    ]
    return f"; use {max(texts[0].opts, key=len)} '{brief(word)}'" if texts and not texts[0].multiple else ""


def _name_of(error: click.UsageError) -> str:
    """The option (its longest form) or the argument that an error is about; empty if it is about neither."""
    parameter = getattr(error, "param", None)
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return "" if parameter is None else str(parameter.human_readable_name)
