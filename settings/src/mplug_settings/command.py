"""mplug config."""

import json
from typing import Any

import click

from mplug.cli.groups import OpenGroup
from mplug.cli.options import PluginName, config_options, resolved
from mplug.cli.tables import table
from mplug.errors import UsageError


class ConfigCommands(OpenGroup):
    """The commands of `mplug config`."""

    path = ("config",)


@click.group(cls=ConfigCommands)
def command() -> None:
    """Show the resolved config, or its JSON Schema."""


@command.command()
@config_options
@click.option("--sources", is_flag=True, help="Also print the source of every value.")
def show(sources: bool, **options: Any) -> None:
    """Print the config that `train` would use with the same options, as YAML.

    The output is a complete config file: mplug config show > run.yaml; mplug train --config run.yaml
    """
    import yaml

    from mplug.config.sources import from_mapping
    from mplug.run.prepare import prepare

    config = resolved(options)
    prepare(config)  # raises the usage errors of plugins
    if not sources:
        click.echo(yaml.safe_dump(config.resolved(), sort_keys=False), nl=False)
        return
    origin = config.sources()
    rows = [(".".join(key), setting.value) for key, setting in from_mapping(config.resolved(), "").items()]
    cells = [(name, json.dumps(value), origin[name]) for name, value in rows]
    click.echo(table(("FIELD", "VALUE", "SOURCE"), cells))


@command.command()
@click.option("--model", type=PluginName("models"), help="Model family.")
@click.option("--optimizer", type=PluginName("optimizers"), help="Optimizer.")
@click.option("--data", type=PluginName("data"), help="Data loader.")
def schema(**names: str | None) -> None:
    """Print the JSON Schema of a config file that names these plugins, for editors.

    An omitted option selects the plugin of the default run.
    """
    from mplug.config.defaults import default_settings
    from mplug.config.sources import Settings
    from mplug.registry.entry_points import Registry
    from mplug.registry.fallbacks import missing_defaults, missing_message
    from mplug_settings.json_schema import config_schema

    registry, default = Registry(), default_settings()
    omitted: Settings = {(section, "name"): default[section, "name"] for section, word in names.items() if not word}
    if missing := missing_defaults(registry, default, omitted):
        raise UsageError(missing_message(registry, missing))
    words = {section: word or default[section, "name"].value for section, word in names.items()}
    click.echo(json.dumps(config_schema(registry, words), indent=2))
