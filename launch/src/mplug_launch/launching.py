"""What the host asks for (`mplug.run.launching.Launching`). Importing this module imports no torch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mplug.distributed.world import World
from mplug_launch.launchers import launched

if TYPE_CHECKING:
    from mplug.distributed.supervision import Supervisor
    from mplug.run.launching import Healing
    from mplug.run.run import Run


class Launching:
    """The class of the entry-point group 'mplug.launchers'."""

    def launched(self) -> World | None:
        """The world that torchrun, srun, mpirun or mpiexec has put this process into."""
        return launched()

    def refuse_port_in_use(self, port: int) -> None:
        """Refuse a port of this machine that is in use."""
        from mplug_launch.launch import refuse_port_in_use

        refuse_port_in_use(port)

    def launch(
        self,
        size: int,
        work: Callable[..., Any],
        *arguments: Any,
        port: int | None = None,
        supervisor: "Supervisor | None" = None,
        healing: "Healing | None" = None,
    ) -> Any:
        """Do the work in processes of this machine."""
        from mplug_launch.launch import launch

        if healing is not None:
            from mplug_launch.survivors import launch_survivors

            return launch_survivors(size, work, arguments, port, supervisor, healing)
        return launch(size, work, *arguments, port=port, supervisor=supervisor)

    def joined(
        self,
        world: World,
        device: str,
        timeout: timedelta | None,
        exchanging: Callable[[], AbstractContextManager[None]],
    ) -> AbstractContextManager[None]:
        """Make this process part of its world."""
        from mplug_launch.joining import joined

        return joined(world, device, timeout, exchanging)

    def find_folder(self, run: "Run", world: World) -> None:
        """Find out which machines share the folder of runs."""
        from mplug_launch.shared_folder import find_own_folders, refuse_unshared_folder

        if world.local_size == world.size:
            return
        if run.hooks.call.gather_checkpoints(config=run.config) is None:
            refuse_unshared_folder(run)
        else:
            find_own_folders(run)
