"""Suggest fields of the config for an unknown option: '--lr' -> optimizer.lr."""

import click

from mplug.errors import listed


def field_hint(error: click.NoSuchOption) -> str:
    """The message for an unknown option that has the name of a field of the config.

    The result is empty if no field has this name, or if the command has no option --set.
    """
    from mplug.config.defaults import default_settings  # reads YAML, which only this error needs

    command = error.ctx.command if error.ctx else None
    has_set = command is not None and any("--set" in option.opts for option in command.params)
    word = error.option_name.lstrip("-").replace("-", "_")
    fields = [".".join(key) for key in default_settings() if key[-1] == word or key[-1].endswith(f"_{word}")]
    if not has_set or not fields:
        return ""
    return (
        f"there is no option '{error.option_name}'; set the field of the config instead: "
        f"{listed(f'--set {field}=VALUE' for field in fields)}"
    )
