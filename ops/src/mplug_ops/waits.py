"""The time that units spend in collectives, for a plugin that measures it.

The operators of this package run their collectives inside `waiting()`. Without a listener it does nothing, at the cost
of about 0.1 us. A listener is called when a collective begins, and returns what is called when it has ended (on a GPU:
when the current stream waits for it).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Listener = Callable[[], Callable[[], None]]

_listeners: list[Listener] = []
_NOTHING = nullcontext()


def waiting() -> AbstractContextManager[None]:
    """Surrounds a collective, or the wait for one."""
    return _heard(_listeners[-1]) if _listeners else _NOTHING


@contextmanager
def _heard(listener: Listener) -> Iterator[None]:
    ended = listener()
    yield
    ended()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have a listener called for the collectives of this package during the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
