"""The command line: one file per command. Importing this package imports no torch, no pydantic and no plugin."""

import ast
import errno
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from mplug.config.entry import Entry
from mplug.errors import RunError, UsageError, suggest
from mplug.registry.entry_points import Registry
from mplug.system.version import __version__

COMMANDS = {
    "train": "Train a model, or continue a run.",
    "config": "Show the resolved config, or its JSON Schema.",
    "checkpoint": "List, show, verify, export and import checkpoints.",
    "plugins": "List, show and check installed plugins, or create a new one.",
}
"""The host's own commands, in the order in which a new user needs them. Each is a module of this package."""
WORDS = "mplug.words"
"""Key of a click context's `meta`: the words of the command line after the name of the command."""


class Commands(click.Group):
    """The commands of the host and of plugins. The group imports a command when the user calls it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return _names(Registry())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import one command."""
        if name in COMMANDS:
            command: click.Command = import_module(f"mplug.cli.{name}").command
            return command
        if name not in Registry().names("commands"):
            return None
        entry = Registry().find("commands", name)
        module, _, attribute = entry.target.partition(":")
        try:
            command = getattr(import_module(module), attribute)
        except (Exception, SystemExit) as error:
            raise UsageError(f"command '{name}' ({entry.origin}) cannot be imported: {error}") from error
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command; for an unknown one, raise UsageError with the nearest name."""
        name = args[0]
        ctx.meta[WORDS] = args[1:]
        if not name.startswith("-") and name not in COMMANDS and name not in self.list_commands(ctx):
            raise UsageError(f"there is no command '{name}'{suggest(name, self.list_commands(ctx))} (see mplug --help)")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands and the host's own options, without importing a command."""
        found = [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing one."""
        registry = Registry()
        summaries = {entry.name: f"{_summary_of(entry)} ({entry.origin})" for entry in registry.entries("commands")}
        with formatter.section("Commands"):
            formatter.write_dl([(name, {**summaries, **COMMANDS}[name]) for name in _names(registry)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Ctrl-C gives the exit status of its signal. For an unknown word, suggest config fields."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            from mplug.cli.hints import argument_hint, option_hint  # only this error needs it

            words = ctx.meta.get(WORDS, [])
            if (
                hint := option_hint(error, words)
                if isinstance(error, click.NoSuchOption)
                else argument_hint(error, words)
            ):
                raise UsageError(hint) from None
            raise
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command. An error becomes a message on stderr and an exit status (2 or 1)."""
        try:
            return super().main(*args, **kwargs)
        except UsageError as error:
            _fail(str(error), 2)
        except RunError as error:
            _fail(str(error), 1)
        except OSError as error:
            file = f": '{error.filename}'" if error.filename else ""
            _fail(f"{error.strerror or error}{file}", 2 if error.errno == errno.ENAMETOOLONG else 1)


def _names(registry: Registry) -> list[str]:
    return [*COMMANDS, *(name for name in registry.names("commands") if name not in COMMANDS)]


def _summary_of(entry: Entry) -> str:
    """The summary of a plugin's command: the docstring in its source, read without an import, or its distribution's."""
    module, _, attribute = entry.target.partition(":")
    package, *inner = module.split(".")
    try:
        spec = find_spec(package)
        path = Path(*(spec.submodule_search_locations or ()) if spec else (), *inner)
        source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError, SyntaxError):
        return entry.summary
    docstrings = (
        ast.get_docstring(part) for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == attribute
    )
    return next((" ".join(text.split("\n\n")[0].split()) for text in docstrings if text), entry.summary)


def _fail(message: str, status: int) -> None:
    lines = message.splitlines()
    click.echo(
        f"mplug: {lines[0]}" if len(lines) == 1 else "mplug:\n" + "\n".join(f"  {line}" for line in lines), err=True
    )
    sys.exit(status)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mplug")
def main() -> None:
    """Train large transformers; every part is a plugin.

    \b
    mplug train                    train a small GPT on Python's own source text
    mplug train --model gpt --preset 125m --set data.path=books/
    """
