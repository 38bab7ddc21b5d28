"""What the host asks of the package that runs several processes. Without it, a run has one process.

Importing this module imports no torch.
"""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from mplug.distributed.supervision import Supervisor
from mplug.distributed.world import World
from mplug.registry.provided import needed, provided

if TYPE_CHECKING:
    from mplug.config.sources import Settings
    from mplug.run.run import Run

SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables by which torchrun, mpirun, mpiexec and srun state the number of processes."""
PACKAGE = "mplug-launch"


class Stopped(Exception):
    """A signal has ended the processes of a launch; they handled it themselves."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = int(number)


@dataclass(frozen=True)
class Healing:
    """How the processes of a run go on after one of them has died.

    `spares` is the number of processes that the launcher starts beforehand to replace dead ones. `layouts` has the
    settings of the run by the number of processes, for each number below the full one with which it can go on.
    `covers(ranks, size)` is whether these ranks, of `size`, together hold the whole state of the run. A spare process
    calls `rehearse` with the arguments of the work when it starts, to import all that it needs later.
    """

    spares: int
    layouts: "Mapping[int, Settings]"
    covers: Callable[[Collection[int], int], bool]
    rehearse: Callable[..., object]


class Launching(Protocol):
    """The methods of the class in the entry-point group 'mplug.launchers'."""

    def launched(self) -> World | None:
        """The world that a launcher has put this process into, or None if the process is alone.

        Raises UsageError for variables that contradict each other or are incomplete, and for processes on several
        machines whose launcher provides no address.
        """

    def refuse_port_in_use(self, port: int) -> None:
        """Raise UsageError if a port of this machine is in use."""

    def launch(
        self,
        size: int,
        work: Callable[..., Any],
        *arguments: Any,
        port: int | None = None,
        supervisor: Supervisor | None = None,
        healing: Healing | None = None,
    ) -> Any:
        """Run `work(*arguments, send)` in `size` processes on this machine, and return the result of rank 0.

        Each process reads its rank from the environment, as under torchrun, and calls `send(step)` at every step. If a
        process dies, the launcher ends the others and raises the error of the first one: a UsageError or RunError
        unchanged, any other error as a RunError that names rank, host and step. Raises `Stopped` after a signal. With a
        supervisor, the launcher kills a process that hangs, and the error names it. No process outlives this one.

        With `healing`, the death of a process does not end the others. Each does its work again, with the variables of
        its new rank, and so does a spare process that takes part. The arguments are the same objects as before.
        """

    def joined(
        self,
        world: World,
        device: str,
        timeout: timedelta | None,
        exchanging: Callable[[], AbstractContextManager[None]],
    ) -> AbstractContextManager[None]:
        """Make this process part of its world for a block: set its GPU, its threads, torch's default process group.

        `timeout` is torch's time-out for a collective. The context manager that `exchanging` returns is entered after
        the processes have met, and surrounds the rest of the block.
        """

    def find_folder(self, run: "Run", world: World) -> None:
        """Find out whether the processes share the folder of rank 0, in which checkpoints are written. Collective.

        Raises UsageError, on every rank, if they must and do not. If a plugin joins the checkpoints of machines, sets
        `run.shared_folder` and `run.sees_first_folder` instead.
        """


def launching(what: str) -> Launching:
    """An object of the installed class. UsageError if none is installed: `what` says what needs it."""
    found: Launching = needed("launchers", what, PACKAGE)
    return found


def launched() -> World | None:
    """The world that torchrun, srun or mpirun has put this process into, or None if the process is alone."""
    found: Launching | None = provided("launchers")
    if found is not None:
        return found.launched()
    for name in SIZES:
        if os.environ.get(name, "1") not in ("", "1"):
            launching(f"processes that a launcher has started ({name}={os.environ[name]})")
    return None


def launch(
    size: int,
    work: Callable[..., Any],
    *arguments: Any,
    port: int | None = None,
    supervisor: Supervisor | None = None,
    healing: Healing | None = None,
) -> Any:
    """Run `work(*arguments, send)` in `size` processes on this machine: `Launching.launch`."""
    launcher = launching(f"a run of {size} processes")
    return launcher.launch(size, work, *arguments, port=port, supervisor=supervisor, healing=healing)


def agreed(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    import torch.distributed as dist  # a config needs no torch

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]
