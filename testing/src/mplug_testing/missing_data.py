"""Whether a data plugin refuses data that does not exist, before a run is announced."""

from collections.abc import Callable

from mplug.config.binding import RunConfig
from mplug.errors import UsageError
from mplug.run.prepare import check_data, prepare

PATH = "no-such-folder/data"


def accepted_missing_data(config: Callable[..., RunConfig]) -> str:
    """The fault of a plugin that accepts a missing `data.path` or does not name it, as a sentence; else ''."""
    try:
        check_data(prepare(config(data__path=PATH)))
    except UsageError as error:
        return "" if PATH in str(error) else f"the error about missing data does not name data.path '{PATH}': {error}"
    return (
        f"data.path '{PATH}' does not exist, and neither 'check_data' nor 'configure' refuses it; a user would see the "
        f"error only after the run has started its processes"
    )
