"""The command line: one file per command. Importing this package imports no torch, no pydantic and no plugin."""

import errno
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from mplug.cli.groups import WORDS, OpenGroup
from mplug.errors import RunError, UsageError
from mplug.system.version import __version__

COMMANDS = {
    "train": "Train a model, or continue a run.",
    "plugins": "List, show and check installed plugins, or create a new one.",
}
"""The host's own commands, in the order in which a new user needs them. Each is a module of this package."""


class Commands(OpenGroup):
    """The commands of the host and of plugins."""

    def summaries(self) -> Mapping[str, str]:
        """The host's own commands."""
        return COMMANDS

    def own(self, name: str) -> click.Command | None:
        """Import one of the host's own commands."""
        return import_module(f"mplug.cli.{name}").command if name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command, and keep the words after its name for hints."""
        ctx.meta[WORDS] = args[1:]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before the name of a command. An error of click becomes one of mplug."""
        with _in_our_words(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Ctrl-C gives the exit status of its signal. An error of click becomes one of mplug."""
        try:
            with _in_our_words(ctx):
                return super().invoke(ctx)
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
        except ModuleNotFoundError as error:
            name = error.name or ""
            if not name.startswith("mplug_") or "." in name:
                raise
            package = name.replace("_", "-")
            _fail(f"this command needs the package {package}, which is not installed: pip install {package}", 2)
        except OSError as error:
            file = f": '{error.filename}'" if error.filename else ""
            _fail(f"{error.strerror or error}{file}", 2 if error.errno == errno.ENAMETOOLONG else 1)


@contextmanager
def _in_our_words(ctx: click.Context) -> Iterator[None]:
    """Turn an error of click about the words of a command line into a UsageError, with a remedy if there is one."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        from mplug.cli.hints import hints  # only this error needs it

        command = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
        found, words = hints(), ctx.meta.get(WORDS, [])
        plain = f"{error.format_message()} (see {error.ctx.command_path if error.ctx else command} --help)"
        raise UsageError(plain if found is None else found.of_line(error, command, words)) from None


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
    mplug train --model gpt --preset 125m --data books/
    """
