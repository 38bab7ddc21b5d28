"""mplug recipes list, show and new."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mplug.commands import PluginName, Registry
from mplug_settings import find_recipe

if TYPE_CHECKING:
    from mplug_settings import InstalledRecipe

GROUP = "recipes"
HEADER = re.compile(r"^recipe:[ \t]*(#.*)?$", re.MULTILINE)
"""The line that begins the section with the description of a recipe."""


@click.group()
def command() -> None:
    """List, show and copy installed recipes: complete, commented configs of runs.

    \b
    mplug recipes list
    mplug train --recipe lora --pretrained Qwen3-8B --set data.path=chats.jsonl
    """


@command.command("list")
def list_() -> None:
    """List installed recipes with what they need."""
    from mplug import UsageError

    registry, broken = Registry(), []
    for name in registry.names(GROUP):
        try:
            recipe = find_recipe(registry, name)
        except UsageError as error:
            broken.append(str(error))
            continue
        click.echo(f"{name}: {recipe.described('summary')}\n    needs: {recipe.described('needs')}")
    for message in broken:
        click.echo(f"mplug: {message}", err=True)
    if not registry.names(GROUP):
        click.echo("no recipe is installed; packages of plugins bring recipes")


@command.command()
@click.argument("name", type=PluginName(GROUP))
def show(name: str) -> None:
    """Print a recipe: a config with comments, and the command that trains with it."""
    recipe = find_recipe(Registry(), name)
    click.echo(f"# {recipe.path} ({recipe.entry.origin})")
    click.echo(f"# Train with it: {_train(recipe, f'--recipe {name}')}")
    click.echo(recipe.text, nl=False)


@command.command()
@click.argument("name", type=PluginName(GROUP))
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write; default: the recipe's NAME.yaml."
)
def new(name: str, output: Path | None) -> None:
    """Copy a recipe into a file of your own, to edit it.

    \b
    mplug recipes new lora
    mplug train --config lora.yaml --pretrained Qwen3-8B --set data.path=chats.jsonl
    """
    from mplug import UsageError, write_whole

    recipe = find_recipe(Registry(), name)
    path = output or Path(f"{recipe.entry.name}.yaml")
    if path.exists():
        raise UsageError(f"'{path}' exists already; remove it, or name another file with --output")
    if not path.parent.is_dir():
        raise UsageError(f"--output: there is no folder '{path.parent}' for '{path.name}'; create it")
    origin = f"recipe:\n  name: {recipe.entry.name}\n  origin: {recipe.entry.origin}"
    write_whole(path, HEADER.sub(origin, recipe.text, count=1))
    click.echo(f"wrote {path}; edit it, and train with: {_train(recipe, f'--config {path}')}")


def _train(recipe: "InstalledRecipe", option: str) -> str:
    """The command that trains with a recipe, with the options for the fields that the recipe leaves to the user.

    The option of a field is at the end of its text, behind a colon; otherwise it is --set.
    """
    given = [text.rpartition(": ")[2] for text in recipe.given.values()]
    options = [
        word if word.startswith("--") else f"--set {field}=..." for field, word in zip(recipe.given, given, strict=True)
    ]
    return " ".join(["mplug train", option, *options])
