"""mplug config."""

import json
from typing import Any

import click

from mplug.cli.options import PluginName, config_options, resolved


@click.group()
def command() -> None:
    """Show the resolved config, or its JSON Schema."""


@command.command()
@config_options
@click.option("--sources", is_flag=True, help="Say where every value was written.")
def show(sources: bool, **options: Any) -> None:
    """Print the config that `train` would run with the same options, as YAML.

    What it prints is a complete config file: mplug config show > run.yaml; mplug train --config run.yaml
    """
    import yaml

    from mplug.settings import from_mapping

    config = resolved(options)
    if not sources:
        click.echo(yaml.safe_dump(config.resolved(), sort_keys=False), nl=False)
        return
    origin = config.sources()
    rows = [(".".join(key), setting.value) for key, setting in from_mapping(config.resolved(), "").items()]
    names, values = (max(len(str(row[column])) for row in rows) for column in (0, 1))
    for name, value in rows:
        shown = "null" if value is None else str(value)
        click.echo(f"{name:<{names}}  {shown:<{values}}  {origin[name]}")


@command.command()
@click.option("--model", default="gpt", type=PluginName("models"), help="Model family.")
@click.option("--optimizer", default="adamw", type=PluginName("optimizers"), help="Optimizer.")
@click.option("--data", default="text", type=PluginName("data"), help="Data loader.")
def schema(**names: str) -> None:
    """Print the JSON Schema of a config file that names these plugins, for editors."""
    from mplug.config import schema as config_schema
    from mplug.registry import Registry

    click.echo(json.dumps(config_schema(Registry(), names), indent=2))
