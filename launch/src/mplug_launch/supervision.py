"""What the launcher and a plugin that finds hanging processes exchange (`mplug.Supervisor`). Imports no torch."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class PluginMessage:
    """A message from a process to its monitor in the launcher. It is dropped if the pipe is full."""

    content: Any


@dataclass(frozen=True)
class Hang:
    """Processes that hang: their ranks, and the sentence with which the run ends."""

    ranks: tuple[int, ...]
    sentence: str


class Monitor(Protocol):
    """Follows the processes of a run in their launcher."""

    def hear(self, rank: int, content: Any) -> None:
        """A process has sent a `PluginMessage` with this content."""

    def begin_step(self, rank: int, step: int) -> None:
        """A process begins a step."""

    def leave(self, rank: int) -> None:
        """A process has ended, or has sent the reason of its end."""

    def hang(self, seconds: float) -> Hang | None:
        """The processes that hang, or None. The launcher kills them, and the run ends with the sentence.

        Called several times a second. `seconds` is the time since the last call.
        """
