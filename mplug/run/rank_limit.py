"""The largest number of ranks of a run."""

from mplug.config.binding import RunConfig
from mplug.config.sources import source_of
from mplug.errors import UsageError
from mplug.layout.mesh import MOST_RANKS


def refuse_too_many_ranks(config: RunConfig, ranks: int) -> None:
    """Raise UsageError for a layout with more ranks than a mesh can have."""
    if ranks > MOST_RANKS:
        raise UsageError(
            f"{layout_words(config)} needs {ranks} ranks, but a layout has at most {MOST_RANKS:,}; use smaller degrees"
        )


def layout_words(config: RunConfig) -> str:
    """The layout for an error message: the field, its source, and its value."""
    source = source_of(config.settings, ("parallel", "layout"))
    return f"parallel.layout ({source}): '{config.parallel.layout}'"
