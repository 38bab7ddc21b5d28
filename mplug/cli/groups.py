"""Groups of commands that installed distributions extend. Listing a group imports no command of a plugin."""

import os
import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

import click
from click.shell_completion import CompletionItem

from mplug.config.entry import Entry
from mplug.errors import UsageError, suggest
from mplug.registry.entry_points import Registry

WORDS = "mplug.words"
"""Key of a click context's `meta`: the words of the command line after the name of the command."""
KIND = "commands"
WHOLE = 1000
"""Maximum number of characters of a command's summary: click would cut it to fit one line."""
PACKAGES = "packages.yaml"
"""The commands of the packages that belong to the default installation, each with the name of its package."""


class OpenGroup(click.Group):
    """A group with commands of its own and those of distributions, which it imports when the user calls them.

    An entry point 'NAME' of the group 'mplug.commands' adds `mplug NAME`, and 'plugins.NAME' adds `mplug plugins NAME`.
    """

    path: tuple[str, ...] = ()
    """The words of the group after `mplug`."""

    def summaries(self) -> Mapping[str, str]:
        """The group's own commands, each with a line of help."""
        return {name: command.get_short_help_str(limit=WHOLE) for name, command in self.commands.items()}

    def own(self, name: str) -> click.Command | None:
        """One of the group's own commands."""
        return self.commands.get(name)

    def added(self, registry: Registry) -> dict[str, Entry]:
        """The commands of distributions by the words that users type; the group's own commands go first."""
        found = {}
        for word in registry.names(KIND):
            distribution, slash, name = word.rpartition("/")
            *group, last = name.split(".")
            if tuple(group) == self.path and last not in self.summaries():
                found[f"{distribution}{slash}{last}"] = registry.find(KIND, word)
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return [*self.summaries(), *self.added(Registry.of_process())]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import one command."""
        if (command := self.own(name)) is not None:
            return command
        entry = self.added(Registry.of_process()).get(name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        try:
            found: click.Command = getattr(import_module(module), attribute)
        except (Exception, SystemExit) as error:
            reason = _described(error, module)
            raise UsageError(f"command '{name}' ({entry.origin}) cannot be imported: {reason}") from error
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command; for an unknown one, raise UsageError with its package or the nearest name."""
        name = args[0]
        if not name.startswith("-") and name not in self.summaries() and name not in self.list_commands(ctx):
            raise UsageError(self._unknown(name, self.list_commands(ctx)))
        return super().resolve_command(ctx, args)

    def _unknown(self, name: str, names: list[str]) -> str:
        command = " ".join((*self.path, name))
        package = _package_of(command)
        if package is not None:
            return f"the command '{command}' is in the package {package}, which is not installed: pip install {package}"
        from mplug.cli.hints import hints  # only this error needs it

        if (found := hints()) is not None and (other := found.of_command(command)):
            return f"there is no command '{command}'; use {other}"
        return f"there is no command '{command}'{suggest(name, names)} (see {' '.join(('mplug', *self.path))} --help)"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands and the group's own options, without importing a command."""
        found = [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing one."""
        added = {
            name: f"{_summary_of(entry)} ({entry.origin})" for name, entry in self.added(Registry.of_process()).items()
        }
        with formatter.section("Commands"):
            formatter.write_dl([*self.summaries().items(), *added.items()])


def _package_of(command: str) -> str | None:
    """The package that has a command of the default installation."""
    import yaml  # only an error needs it

    with open(os.path.join(os.path.dirname(__file__), PACKAGES), encoding="utf-8") as file:
        table: dict[str, str] = yaml.safe_load(file)
    return table.get(command)


def _described(error: BaseException, module: str) -> str:
    """The type and the message of an error of an import, and the last line of the module's package that it passed."""
    import traceback  # only this error needs them
    from pathlib import Path

    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    package, files = module.partition(".")[0], traceback.extract_tb(error.__traceback__)
    frames = [one for one in files if package in (*Path(one.filename).parts, Path(one.filename).stem)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _summary_of(entry: Entry) -> str:
    """The summary of a plugin's command: the docstring in its source, read without an import, or its distribution's."""
    module, _, attribute = entry.target.partition(":")
    try:
        source = _source_of(entry.source, module.split("."))
        text = _docstring(source, attribute)
    except (ImportError, OSError, ValueError, SyntaxError):
        return entry.summary
    return " ".join(text.split("\n\n")[0].split()) if text else entry.summary


def _docstring(source: str, name: str) -> str | None:
    """The first paragraph of the docstring of a function of a module.

    Parsing takes most of the time of `mplug --help`, so it is for what the usual form does not match.
    """
    head = rf"^def {re.escape(name)}\((?:[^\n]*|\n(?:    [^\n]*\n)*)\)[^\n]*:\n    "
    plain = re.search(head + r'"""([^"\\]+?)(?:"""|\n\n)', source, re.MULTILINE)
    if plain is not None:
        return plain[1]
    import ast

    parts = ast.parse(source).body
    found = (ast.get_docstring(one) for one in parts if isinstance(one, ast.FunctionDef) and one.name == name)
    return next(filter(None, found), None)


def _source_of(folder: str, names: list[str]) -> str:
    """The source of a module of the distribution in a folder; OSError if there is none.

    A search along `sys.path` lists every folder of it, so it comes last: an editable install adds a folder per package.
    """
    file = _file_of(os.path.join(folder, *names), os.path.join(folder, "src", *names))
    if file is None and (spec := find_spec(names[0])) is not None:
        file = _file_of(*(os.path.join(place, *names[1:]) for place in spec.submodule_search_locations or ()))
    if file is None:
        raise FileNotFoundError(f"the module '{'.'.join(names)}' has no source")
    with open(file, encoding="utf-8") as source:
        return source.read()


def _file_of(*modules: str) -> str | None:
    """The first of some modules or packages, given as paths without an end, that has a file."""
    files = (one + end for one in modules for end in (".py", f"{os.sep}__init__.py"))
    return next(filter(os.path.isfile, files), None)
