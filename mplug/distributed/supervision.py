"""The contract of a plugin that finds processes of a run that hang (hook `supervise`).

The host lends such a plugin the pipe between a process and the launcher of `mplug train`. Under another launcher, the
processes of the plugin exchange their reports themselves.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

Send = Callable[[Any], None]
"""Sends the number of a step that begins, or a message of a plugin, from a process to the launcher.

A message of a plugin is a `mplug_launch.PluginMessage`.
"""


class Supervisor(Protocol):
    """Finds processes of a run that hang, and ends the run."""

    @property
    def collective_seconds(self) -> float:
        """Seconds after which torch ends a collective.

        Choose more seconds than this plugin needs to find the rank that hangs: the error of torch names a rank that
        waits.
        """

    def monitor(self) -> Any:
        """A `mplug_launch.Monitor` of the processes that `mplug train` starts on this machine.

        Called for each attempt.
        """

    def report(self, send: Send) -> AbstractContextManager[None]:
        """Surrounds the work of a process that `mplug train` started, from before it joins the others to its end.

        `send` passes `PluginMessage`s to the monitor. It may be called from any thread.
        """

    def exchange(self, attempt: str) -> AbstractContextManager[None]:
        """Surrounds the work of a process that another launcher started, from the moment at which the ranks have met.

        MASTER_ADDR and MASTER_PORT are the address of the store at which they met. `attempt` is a name that differs
        between jobs, and between the attempts of one job. There is no monitor: the plugin ends this process itself.
        """
