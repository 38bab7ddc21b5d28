"""Convert the exceptions of a plugin that checks a config to one message that names the plugin."""

from collections.abc import Iterator
from contextlib import contextmanager

from mplug.errors import RunError, UsageError
from mplug.registry.entry_points import BrokenPlugin


@contextmanager
def asking(label: str, what: str) -> Iterator[None]:
    """Wrap a block in which the plugin `label` checks the config, in its method `what`.

    A ValueError means that the plugin refuses a value: it becomes a UsageError. Any other exception is a fault of the
    plugin: it becomes a BrokenPlugin, whose message names the line that raised it. Both have exit status 2.
    """
    try:
        yield
    except (UsageError, RunError):
        raise
    except ValueError as error:
        raise UsageError(f"{label} refuses the config (in '{what}'): {_text_of(error)}") from error
    except Exception as error:
        raise BrokenPlugin(f"{label} fails in '{what}': {fault(error)}") from error


def fault(error: Exception) -> str:
    """An exception of a plugin's code on one line, with the file and line that raised it."""
    from traceback import extract_tb  # only errors need it

    frames = extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {_text_of(error)}{place}"


def _text_of(error: Exception) -> str:
    return " ".join(str(error).split()) or "no reason given"
