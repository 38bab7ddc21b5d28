"""Which fields of the config an unknown option may mean: '--lr' -> optimizer.lr."""

import click

from mplug.errors import listed


def fields_meant(error: click.NoSuchOption) -> str:
    """The sentence for an unknown option that is named like a field of the config; empty if there is none.

    Only commands that take --set get it.
    """
    from mplug.config.defaults import default_settings  # reads YAML, which only this error needs

    command = error.ctx.command if error.ctx else None
    takes_set = command is not None and any("--set" in option.opts for option in command.params)
    word = error.option_name.lstrip("-").replace("-", "_")
    found = [".".join(key) for key in default_settings() if key[-1] == word or key[-1].endswith(f"_{word}")]
    if not takes_set or not found:
        return ""
    return (
        f"there is no option '{error.option_name}'; set the field of the config instead: "
        f"{listed(f'--set {field}=VALUE' for field in found)}"
    )
