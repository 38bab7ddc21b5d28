"""The words of a command line that belong to no option: assignments such as 'trainer.steps=100', and a config file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mplug.cli.groups import WORDS
from mplug.cli.hints import assignment_hint, hints
from mplug.errors import UsageError, brief

if TYPE_CHECKING:
    from mplug.config.sources import Settings

ARGUMENT = "argument"
"""The source of settings that the command line assigns without an option."""
YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class Given:
    """What the words say, beside the config file of --config."""

    file: Path | None
    settings: "Settings"


def read_words(words: tuple[str, ...], file: Path | None, assignments: tuple[str, ...]) -> Given:
    """The config file and the settings that words name. UsageError, with the remedy, for any other word."""
    _refuse_value_after_a_space(words, assignments)
    assigned = [word for word in words if "=" in word and not word.startswith("=")]
    files = [Path(word).expanduser() for word in words if word not in assigned and word.lower().endswith(YAML)]
    for word in words:
        if word not in assigned and not word.lower().endswith(YAML):
            raise UsageError(_remedy(word))
    if len(files) + (file is not None) > 1:
        names = [f"'{path}'" for path in ([file] if file is not None else []) + files]
        raise UsageError(f"{' and '.join(names)} are two config files, and a command reads one; join them")
    if not assigned:
        return Given(file or next(iter(files), None), {})
    from mplug.config.sources import read_assignments

    assignment_hint(assigned, "")
    settings = read_assignments(assigned, ARGUMENT)
    for key in read_assignments(assignments):
        if key in settings:
            raise UsageError(f"'{'.'.join(key)}' is set with --set and without; remove one of the two")
    return Given(file or next(iter(files), None), settings)


def _refuse_value_after_a_space(words: tuple[str, ...], assignments: tuple[str, ...]) -> None:
    """Raise UsageError for '--set trainer.steps 100'."""
    context = click.get_current_context(silent=True)
    line = context.meta.get(WORDS, []) if context else []
    for place, word in enumerate(line[2:], 2):
        field = line[place - 1]
        if line[place - 2] == "--set" and field in assignments and "=" not in field and word in words:
            raise UsageError(f"--set '{brief(field)}' is not an assignment; use --set {field}={word}")


def _remedy(word: str) -> str:
    """The message for a word that is neither an assignment nor a config file."""
    known = "" if (found := hints()) is None else found.of_word(word)
    if known:
        return known
    end = "" if Path(word).expanduser().exists() else ", and there is no such file"
    return (
        f"'{brief(word)}' is neither an option, nor an assignment (trainer.steps=100), nor a config file "
        f"(FILE.yaml){end}"
    )
