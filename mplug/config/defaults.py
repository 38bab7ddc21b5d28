"""The settings that a run starts from: the defaults of the host, or those of a saved run."""

from functools import cache
from pathlib import Path

from mplug.config.sources import Setting, Settings, merge, read_file

DEFAULT = "default.yaml"
FINE_TUNING = "fine_tuning.yaml"
OWN_FINE_TUNING = "fine-tuning default of "
"""The source of a default of fine-tuning that a plugin brings, before the label of the plugin."""


def default_settings() -> Settings:
    """The settings of the default run."""
    return dict(_read_defaults())


@cache
def _read_defaults() -> Settings:
    return read_file(Path(__file__).with_name(DEFAULT), DEFAULT)


def is_default(setting: Setting) -> bool:
    """Whether a setting of a run's base is one of the default run, and not of a saved run."""
    return setting.source.startswith(f"{DEFAULT}:")


def is_fine_tuning_default(setting: Setting) -> bool:
    """Whether a setting is a default of fine-tuning, of the host or of a plugin."""
    return setting.source.startswith((f"{FINE_TUNING}:", OWN_FINE_TUNING))


def under_fine_tuning(preset: Settings, base: Settings) -> Settings:
    """A preset without what defaults of fine-tuning in `base` replace: the rate of a preset is for training anew."""
    return {key: one for key, one in preset.items() if key not in base or not is_fine_tuning_default(base[key])}


def saved_settings(directory: Path) -> Settings:
    """The settings in the folder of a run. Host fields that were added after the run was saved have their defaults."""
    from mplug.config.binding import HOST_SECTIONS, OPTIONAL_SECTIONS, SECTIONS  # imports pydantic; help does not

    ours = {key: setting for key, setting in default_settings().items() if key[0] in HOST_SECTIONS}
    needed = [section for section in SECTIONS if section not in OPTIONAL_SECTIONS]
    return merge(ours, read_file(directory / "config.yaml", needed=needed))
