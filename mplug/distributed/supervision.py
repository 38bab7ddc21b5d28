"""The contract of a plugin that finds processes of a run that hang (hook `supervise`).

The host lends such a plugin the pipe between a process and the launcher of `mplug train`. Under another launcher, the
processes of the plugin exchange their reports themselves.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class PluginMessage:
    """A message from a process to its monitor in the launcher. It is dropped if the pipe is full."""

    content: Any


Send = Callable[[int | PluginMessage], None]
"""Sends the number of a step that begins, or a message of a plugin, from a process to the launcher."""


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


class Supervisor(Protocol):
    """Finds processes of a run that hang, and ends the run."""

    @property
    def collective_seconds(self) -> float:
        """Seconds after which torch ends a collective.

        Choose more seconds than this plugin needs to find the rank that hangs: the error of torch names a rank that
        waits.
        """

    def monitor(self) -> Monitor:
        """A monitor of the processes that `mplug train` starts on this machine. Called for each attempt."""

    def report(self, send: Send) -> AbstractContextManager[None]:
        """Surrounds the work of a process that `mplug train` started, from before it joins the others to its end.

        `send` passes `PluginMessage`s to the monitor. It may be called from any thread.
        """

    def exchange(self, attempt: str) -> AbstractContextManager[None]:
        """Surrounds the work of a process that another launcher started, from the moment at which the ranks have met.

        MASTER_ADDR and MASTER_PORT are the address of the store at which they met. `attempt` is a name that differs
        between jobs, and between the attempts of one job. There is no monitor: the plugin ends this process itself.
        """
