"""A command. Importing this module leaves a file behind, so that a test can tell whether it was imported."""

from pathlib import Path

import click

Path("acme_tools was imported").touch()


@click.command()
@click.option("--who", default="world", show_default=True, help="Whom to greet.")
def greet(who: str) -> None:
    """Greet someone."""
    click.echo(f"hello {who}")
