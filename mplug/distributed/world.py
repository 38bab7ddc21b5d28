"""This process among the processes of its run."""

import os
from dataclasses import dataclass

LOCALHOST = "127.0.0.1"
DEFAULT_PORT = 29500
"""torch's own default, for launchers that provide no identifier of a job."""


def attempt() -> int:
    """How often the launcher has let the processes of this run begin again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@dataclass(frozen=True)
class World:
    """This process among those of its run."""

    rank: int
    size: int
    local_rank: int
    launcher: str
    local_size: int | None = None
    """Number of the run's processes on this machine, where the launcher gives it."""
    address: str = LOCALHOST
    """Host name or IP address of the machine of rank 0, where the processes meet."""
    port: int = DEFAULT_PORT
    job: str = ""
    """The launcher's identifier of this job; empty if the launcher provides none."""
    derived: bool = False
    """Whether the address is derived from the launcher's variables, so that rank 0 must check that it is its own."""

    @property
    def restart(self) -> int:
        """How often the launcher has started its processes again."""
        return attempt()

    @property
    def may_restart(self) -> bool:
        """Whether the launcher starts its processes again when one dies."""
        return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which torch's `env://` finds the other processes."""
        return {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
        }
