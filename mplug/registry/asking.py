"""Call a plugin that checks a config: an exception of its code becomes one sentence that names the plugin."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import extract_tb

from mplug.errors import RunError, UsageError
from mplug.registry.entry_points import BrokenPlugin


@contextmanager
def asking(label: str, what: str) -> Iterator[None]:
    """Wrap a block in which a plugin checks the config.

    A ValueError means that the plugin refuses a value (UsageError); any other exception is a fault of the plugin
    (BrokenPlugin). Both exit with status 2. The sentence about a fault names the line that raised it.
    """
    try:
        yield
    except (UsageError, RunError):
        raise
    except ValueError as error:
        raise UsageError(f"{label} refuses the config ('{what}'): {_said(error)}") from error
    except Exception as error:
        raise BrokenPlugin(f"{label} fails in '{what}': {fault(error)}") from error


def fault(error: Exception) -> str:
    """An exception of a plugin's code on one line, with the place that raised it."""
    frames = extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {_said(error)}{place}"


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or "no reason given"
