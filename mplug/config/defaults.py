"""The settings that a run starts from: the defaults of the host, or those of a saved run."""

from pathlib import Path

from mplug.config.sources import Setting, Settings, merge, read_file

DEFAULT = "default.yaml"


def default_settings() -> Settings:
    """The settings of the default run."""
    return read_file(Path(__file__).with_name(DEFAULT), DEFAULT)


def is_default(setting: Setting) -> bool:
    """Whether a setting of a run's base is one of the default run, and not of a saved run."""
    return setting.source.startswith(f"{DEFAULT}:")


def saved_settings(directory: Path) -> Settings:
    """The settings in the folder of a run. Host fields that were added after the run was saved have their defaults."""
    from mplug.config.binding import HOST_SECTIONS, OPTIONAL_SECTIONS, SECTIONS  # imports pydantic; help does not

    ours = {key: setting for key, setting in default_settings().items() if key[0] in HOST_SECTIONS}
    needed = [section for section in SECTIONS if section not in OPTIONAL_SECTIONS]
    return merge(ours, read_file(directory / "config.yaml", needed=needed))
