"""An option of the command line that sets one field of the config."""

from typing import Any

import click


class SettingOption(click.Option):
    """An option that sets one field of the config. Its help shows the value of the default run."""

    def __init__(self, *declarations: Any, field: str, **details: Any) -> None:
        super().__init__(*declarations, **details)
        self.field = field

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option and its help."""
        from mplug.config.defaults import default_settings  # reads YAML, which only help needs

        record, setting = super().get_help_record(ctx), default_settings().get(tuple(self.field.split(".")))
        if record is None or setting is None or setting.value in (None, ""):
            return record
        shown = ", ".join(setting.value) if isinstance(setting.value, list) else setting.value
        return record[0], f"{record[1]}  [default: {shown}]"
