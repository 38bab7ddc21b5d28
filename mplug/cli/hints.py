"""Suggest the field of the config for a word that is no option: '--lr 1e-3' -> --set optimizer.lr=1e-3."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

import click

from mplug.errors import UsageError

CUTOFF = 0.7
"""Smallest similarity (difflib's ratio) of a word and a name that is suggested for it."""


def option_hint(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """The message for the unknown options among the words of a command line, one line per option.

    The result is empty if the command has no option --set, or if one of the command's own options is the nearest name.
    """
    command = error.ctx.command if error.ctx else None
    options = {name for option in command.params for name in option.opts} if command else set()
    if "--set" not in options:
        return ""
    fields = _fields()
    name = _name(error.option_name)
    nearest_option = _similarity(name, {_name(option) for option in options})
    if nearest_option and nearest_option >= _similarity(name, {field[-1] for field in fields}):
        return ""
    used = {word.partition("=")[0]: _value(words, number) for number, word in enumerate(words)}
    unknown = {name: value for name, value in used.items() if name.startswith("--") and name not in options}
    return "\n".join(_line(name, value, fields) for name, value in (unknown or {error.option_name: None}).items())


def assignment_hint(assignments: Sequence[str]) -> None:
    """Raise UsageError if an assignment of --set names a field without its section, as in 'steps=10'."""
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name or "." in name:
            continue
        fields = _fields()
        if name not in {field[0] for field in fields} and (matches := _matches(name, fields)):
            remedies = " or ".join(f"--set {field}={value}" for field in matches)
            raise UsageError(f"--set '{assignment}': '{name}' lacks the section of its field; use {remedies}")


def argument_hint(error: click.UsageError, words: Sequence[str]) -> str:
    """The message for a word that belongs to no option: the value of --set after a space, or a path to train on.

    The result is empty if the error is another one, or if the word is neither of both.
    """
    command = error.ctx.command if error.ctx else None
    found = re.search(r"extra arguments? \((\S+?)[\s)]", error.message)
    if command is None or not found or not any("--set" in option.opts for option in command.params):
        return ""
    word = found[1]
    place = words.index(word) if word in words else 0
    if place >= 2 and words[place - 2] == "--set" and "=" not in words[place - 1]:
        return f"--set '{words[place - 1]}' is not an assignment; use --set {words[place - 1]}={word}"
    if Path(word).exists():
        return f"'{word}' is no option; to train on the file or folder '{word}', use --set data.path={word}"
    return ""


def _fields() -> list[tuple[str, ...]]:
    """The fields of the default run, those of its plugins included; if its plugins are missing, the host's fields."""
    from mplug.config.defaults import default_settings  # reads YAML, which only these errors need
    from mplug.config.sources import from_mapping
    from mplug.registry.entry_points import Registry
    from mplug.registry.resolve import resolve

    default = default_settings()
    try:
        return [*from_mapping(resolve(Registry(), default, {}).resolved(), "")]
    except UsageError:
        return [*default]


def _matches(word: str, fields: Sequence[tuple[str, ...]]) -> list[str]:
    """The fields with this name; else those whose name begins or ends with it; else those with the nearest name."""
    name = _name(word)
    exact = [field for field in fields if field[-1] == name]
    part = [field for field in fields if field[-1].startswith(f"{name}_") or field[-1].endswith(f"_{name}")]
    close = difflib.get_close_matches(name, {field[-1] for field in fields}, n=1, cutoff=CUTOFF)
    return sorted(".".join(field) for field in exact or part or [field for field in fields if field[-1] in close])


def _line(option: str, value: str | None, fields: Sequence[tuple[str, ...]]) -> str:
    """The message for one unknown option."""
    matches = _matches(option, fields)
    if not matches:
        return f"there is no option '{option}'; 'mplug config show' prints the fields that --set can set"
    remedies = " or ".join(f"--set {field}={'VALUE' if value is None else value}" for field in matches)
    return f"there is no option '{option}'; set the field of the config instead: {remedies}"


def _value(words: Sequence[str], number: int) -> str | None:
    """The value of the option at a place among the words: after its '=', or the next word."""
    _, equals, value = words[number].partition("=")
    if equals:
        return value
    following = words[number + 1] if number + 1 < len(words) else "--"
    return None if following.startswith("--") else following


def _similarity(word: str, names: set[str]) -> float:
    """The similarity of a word and the nearest of the names, between 0 and 1; 0 below CUTOFF."""
    ratio = max(difflib.SequenceMatcher(None, word, name).ratio() for name in names)
    return ratio if ratio >= CUTOFF else 0.0


def _name(option: str) -> str:
    """The name of a field that an option would set: '--seq-length' -> 'seq_length'."""
    return option.lstrip("-").replace("-", "_")
