"""Suggest the right form for an option that does not exist: '--learning-rate 1e-3' -> --lr 1e-3."""

import difflib
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from mplug.cli.setting_option import SettingOption
from mplug.errors import UsageError, brief
from mplug.registry.entry_points import Registry

NEAR_MISSES = Path(__file__).with_name("near_misses.yaml")
"""Words of other tools, and what mplug calls the same thing."""

CUTOFF = 0.7
"""Smallest similarity (difflib's ratio) of a word and a name that is suggested for it."""


def option_hint(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """The message for the unknown options among the words of a command line, one line per option.

    The result is empty if the command has no option --set, or if one of the command's own options is the nearest name.
    """
    command = error.ctx.command if error.ctx else None
    options = {name: option for option in command.params for name in option.opts} if command else {}
    if "--set" not in options:
        return ""
    short = {
        one.field: name for name, one in options.items() if name.startswith("--") and isinstance(one, SettingOption)
    }
    hints = Hints(options, _fields(), short, _near_misses(), tuple(Registry.of_process().names("parallel")))
    unknown = _unknown(words, options) or {error.option_name: None}
    lines = [hints.line(name, value) for name, value in unknown.items()]
    if len(lines) == 1 and hints.is_last_resort(name := next(iter(unknown))):
        nearest = _similarity(_name(name), {_name(option) for option in options})
        if nearest and nearest >= _similarity(_name(name), {field[-1] for field in hints.fields}):
            return ""
    return "\n".join(lines)


def _unknown(words: Sequence[str], options: Container[str]) -> dict[str, str | None]:
    """The words that are no options but begin as one, each with its value; '-steps' counts as '--steps' does."""
    used = {word.partition("=")[0]: _value(words, number) for number, word in enumerate(words)}
    return {
        name: value
        for name, value in used.items()
        if re.match(r"--?[A-Za-z]", name) and name not in options and name != "--"
    }


@dataclass(frozen=True)
class Hints:
    """What may be meant by an option that does not exist.

    `options` are those of the command, `fields` those of the config, `short` the short options of the command by their
    fields, `misses` the words of other tools (near_misses.yaml), and `strategies` the installed parallel strategies.
    """

    options: Container[str]
    fields: Sequence[tuple[str, ...]]
    short: Mapping[str, str]
    misses: Mapping[str, str]
    strategies: tuple[str, ...]

    def line(self, option: str, value: str | None) -> str:
        """The message for one unknown option."""
        known = "" if self._dotted(option) else self._sentence(option, value) or self._layout(option, value)
        if known:
            return f"there is no option '{brief(option)}'; {known}"
        matches = self._matches(option)
        if not matches:
            return f"there is no option '{brief(option)}'; 'mplug config show' prints the fields that --set can set"
        forms = [self._form(field, value) for field in matches]
        return f"there is no option '{brief(option)}'; use {' or '.join(forms)}"

    def is_last_resort(self, option: str) -> bool:
        """Whether the message for an option rests on a similar word, or on nothing."""
        if self._sentence(option, None) or self._layout(option, None):
            return False
        return _last(option) not in {field[-1] for field in self.fields} and not self._dotted(option)

    def _sentence(self, option: str, value: str | None) -> str:
        """What near_misses.yaml says about the word."""
        found = self.misses.get(_name(option)) or self.misses.get(_last(option)) or ""
        if "." in found and " " not in found:
            return f"use {self._form(found, value)}"
        named = re.match(r"use (--[a-z-]+)", found)
        return "" if named and named[1] not in self.options else found

    def _layout(self, option: str, value: str | None) -> str:
        """The layout for the degree of a strategy: '--tp 2', '--tensor-model-parallel-size 2'."""
        word = re.sub(r"_(size|degree)$", "", _last(option))
        words = [part for part in word.split("_") if part != "model"]
        initials = "".join(part[:1] for part in words) if words[-1:] == ["parallel"] else word
        if initials not in self.strategies:
            return ""
        return f"use --parallel {initials}{value or 'N'} (a layout of several strategies is one word, such as tp4pp2)"

    def _matches(self, option: str) -> list[str]:
        """The field 'section.field' that the option spells; else fields with its last word, or the nearest ones."""
        return self._dotted(option) or _matches(_last(option), self.fields)

    def _dotted(self, option: str) -> list[str]:
        return [".".join(field) for field in self.fields if ".".join(field) == _name(option)]

    def _form(self, field: str, value: str | None) -> str:
        """How the command takes a field: a short option or one of its own, or --set."""
        shown = "VALUE" if value is None else value
        own = f"--{field.rpartition('.')[2].replace('_', '-')}"
        option = self.short.get(field) or (own if own in self.options else None)
        return f"{option} {shown}" if option else f"--set {field}={shown}"


def _near_misses() -> dict[str, str]:
    """The words of other tools: each with a field, or with a sentence."""
    import yaml  # only this error needs it

    table = yaml.safe_load(NEAR_MISSES.read_text(encoding="utf-8"))
    return {word: answer for answer, words in table.items() for word in words.split()}


def refuse_bare_fields(assignments: Sequence[str], option: str) -> None:
    """Raise UsageError if an assignment names a field without its section, as in 'steps=10'."""
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name or "." in name:
            continue
        fields = _fields()
        if name not in {field[0] for field in fields} and (matches := _matches(name, fields)):
            remedies = " or ".join(f"{option}{field}={value}" for field in matches)
            raise UsageError(f"{option}'{assignment}': '{name}' lacks the section of its field; use {remedies}")


def _fields() -> list[tuple[str, ...]]:
    """The fields of the default run, those of its plugins included; if its plugins are missing, the host's fields."""
    from mplug.config.defaults import default_settings  # reads YAML, which only these errors need
    from mplug.config.sources import from_mapping
    from mplug.registry.resolve import resolve

    default = default_settings()
    try:
        return [*from_mapping(resolve(Registry.of_process(), default, {}).resolved(), "") | default]
    except UsageError:
        return [*default]


def _matches(word: str, fields: Sequence[tuple[str, ...]]) -> list[str]:
    """The fields with this name; else those whose name begins or ends with it; else those with the nearest name."""
    name = _name(word)
    exact = [field for field in fields if field[-1] == name]
    part = [field for field in fields if field[-1].startswith(f"{name}_") or field[-1].endswith(f"_{name}")]
    close = difflib.get_close_matches(name, {field[-1] for field in fields}, n=1, cutoff=CUTOFF)
    return sorted(".".join(field) for field in exact or part or [field for field in fields if field[-1] in close])


def _value(words: Sequence[str], number: int) -> str | None:
    """The value of the option at a place among the words: after its '=', or the next word."""
    _, equals, value = words[number].partition("=")
    if equals:
        return value
    following = words[number + 1] if number + 1 < len(words) else "--"
    return None if re.match(r"--|-[A-Za-z]", following) else following


def _similarity(word: str, names: set[str]) -> float:
    """The similarity of a word and the nearest of the names, between 0 and 1; 0 below CUTOFF."""
    ratio = max(difflib.SequenceMatcher(None, word, name).ratio() for name in names)
    return ratio if ratio >= CUTOFF else 0.0


def _name(option: str) -> str:
    """The name of a field that an option would set: '--seq-length' -> 'seq_length'."""
    return option.lstrip("-").replace("-", "_")


def _last(option: str) -> str:
    """The last part of a dotted name: '--training.seq_len' -> 'seq_len'."""
    return _name(option).rpartition(".")[2]
