"""The commands that pages show, and their check without running them."""

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click

from mplug.cli import main
from mplug.cli.options import config_options, overrides
from mplug.config.defaults import default_settings
from mplug.config.sources import Settings, merge, read_assignments
from mplug.training.job import settle

BEFORE = re.compile(r"^(?:(?:srun|torchrun|mpirun) .* )?(?:-m )?(?:\.venv/bin/)?mplug(?= )")
"""What stands before the words of a command: the name of the program, and what launches it."""


@dataclass(frozen=True)
class Shown:
    """A command on a page.

    `is_open`: the page leaves a part of it to the reader (`...`). `is_refused`: the page shows an error as its output.
    """

    page: Path
    words: tuple[str, ...]
    is_open: bool
    is_refused: bool

    def __str__(self) -> str:
        return f"mplug {shlex.join(self.words)}"


def commands_of(page: Path) -> list[Shown]:
    """The commands in the blocks of code of a page."""
    lines = [*_lines(page.read_text(encoding="utf-8")), ""]
    return [
        found
        for line, following in itertools.pairwise(lines)
        if (found := _command(page, line.removeprefix("$ "), following)) is not None
    ]


def _command(page: Path, line: str, following: str) -> Shown | None:
    start = BEFORE.match(line)
    if start is None:
        return None
    text = re.split(r" {2,}(?![-'\"\[])", line[start.end() :].strip())[0]  # a remark follows after two spaces
    text = re.sub(r"\[(--[^\]]*?)(?: (?:N|GB))?\]", _optional, text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words = list(lexer)
    words = words[: next((at for at, word in enumerate(words) if re.fullmatch(r"[|&;<>]+", word)), len(words))]
    kept = [word for before, word in zip(["", *words], words, strict=False) if word != "..." or before == "--variant"]
    return Shown(page, tuple(kept), "..." in text, following == "mplug:" or following.startswith("mplug: "))


def _optional(found: re.Match[str]) -> str:
    """An option in brackets, with a number in the place of the name of a number."""
    return f"{found[1]} 1" if found[0].endswith((" N]", " GB]")) else found[1]


def _lines(text: str) -> Iterator[str]:
    """The lines of the blocks of code, unindented. A line goes on after a backslash, and within quotes."""
    whole, fenced = "", False
    for line in text.splitlines():
        if line.strip().startswith("```"):
            fenced = not fenced
        elif not (fenced or line.startswith("    ")):
            whole = ""
        else:
            whole += line.strip()
            if whole.endswith("\\"):
                whole = whole[:-1]
            elif BEFORE.match(whole.removeprefix("$ ")) and whole.count("'") % 2:
                whole += " "
            else:
                yield whole
                whole = ""


def parsed(words: tuple[str, ...]) -> click.Context:
    """The command with the values of its options; click.UsageError for an unknown command, option or value."""
    command: click.Command = main
    context, left = click.Context(main, info_name="mplug", **main.context_settings), list(words)
    while isinstance(command, click.Group) and left and not left[0].startswith("-"):
        name = left.pop(0)
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"there is no command '{name}'", context)
        command, context = found, click.Context(found, info_name=name, parent=context)
    if left == ["--help"]:
        return context
    return command.make_context(context.info_name, left, parent=context.parent)


def changed_by(context: click.Context) -> Settings | None:
    """The settings that the options of a command change; None for a command without the options of a config."""
    own = {one.name: getattr(one, "help", None) for one in context.command.params}
    names = [name for name, text in _config_options().items() if own.get(name, "absent") == text]
    given: dict[str, Any] = {str(name): context.params[str(name)] for name in names}
    return overrides(**given) if {"assignments", "file"} <= {*given} else None


def settle_as_train(context: click.Context) -> int:
    """Prepare each run that a command describes, up to its mesh, as `mplug train` does; returns their number.

    Raises UsageError for settings that are refused before a process starts. A command without the options of a config
    describes no run.
    """
    changed = changed_by(context)
    if changed is None:
        return 0
    variants = context.params.get("variants") or ("",)
    for variant in variants:
        settle(default_settings(), merge(changed, read_assignments(variant.split(), "--variant")), None)
    return len(variants)


@cache
def _config_options() -> dict[str | None, str | None]:
    """The parameters that a command has for its config, each with its help: some commands have others of a name."""

    def command() -> None: ...

    return {one.name: getattr(one, "help", None) for one in vars(config_options(command))["__click_params__"]}


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "commands.md"]  # written from the code
PAGES += sorted(ROOT.glob("plugins/*/*/README.md")) + sorted(ROOT.glob("[a-z]*/README.md"))
COMMANDS = {page: commands_of(page) for page in PAGES}
