"""mplug completion install, show and remove."""

import os
from pathlib import Path

import click

from mplug_completion.shells import NAMES, Shell

SHELL = click.option("--shell", "name", type=click.Choice(NAMES), help="The shell; default: the one that $SHELL names.")


@click.group()
def command() -> None:
    """Install the completion of mplug for bash, zsh or fish.

    \b
    mplug completion install
    """


@command.command()
@SHELL
def install(name: str | None) -> None:
    """Make new shells complete mplug's commands, options and names.

    For bash and zsh, the command writes a script and adds a line to ~/.bashrc or ~/.zshrc that sources it. Fish finds
    its script by itself. A second call changes nothing.
    """
    shell = _chosen(name)
    changed = shell.install()
    for path in changed:
        click.echo(f"wrote {path}")
    if changed:
        click.echo(f"new shells complete mplug; in this one, run: source {shell.script}")
    else:
        click.echo(f"the completion for {shell.name} is installed already")


@command.command()
@SHELL
def show(name: str | None) -> None:
    """Print the script that completes mplug, and change nothing."""
    click.echo(_chosen(name).source(), nl=False)


@command.command()
@SHELL
def remove(name: str | None) -> None:
    """Remove what `install` wrote."""
    shell = _chosen(name)
    changed = shell.remove()
    for path in changed:
        click.echo(f"{'changed' if path.exists() else 'removed'} {path}")
    if not changed:
        click.echo(f"the completion for {shell.name} is not installed")


def _chosen(name: str | None) -> Shell:
    """The shell that an option or $SHELL names; UsageError if there is none."""
    from mplug import UsageError

    word = name or Path(os.environ.get("SHELL", "")).name
    if word not in NAMES:
        stated = f"the completion is for bash, zsh and fish, not for '{word}'" if word else "$SHELL is not set"
        raise UsageError(f"{stated}; name one of them with --shell")
    return Shell(word)
