"""`Fault`: how a test of a suite says that a plugin violates its contract."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import SkipTest


class Fault(AssertionError):
    """A plugin violates its contract. The message states how."""


def require(condition: object, message: str) -> None:
    """Raise Fault unless the condition holds."""
    if not condition:
        raise Fault(message)


@contextmanager
def naming_failures(where: str) -> Iterator[None]:
    """Turn any exception of a plugin in the block into a Fault whose message begins with `where`."""
    try:
        yield
    except (Fault, SkipTest):
        raise
    except Exception as error:
        raise Fault(f"{where}: it raises {type(error).__name__}: {error}") from error
