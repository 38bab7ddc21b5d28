"""This process among the processes of its run, as torchrun, mpirun or srun describes it in the environment.

Everything here is a function of the environment's variables: no torch, no socket, no file.

| launcher | address where the processes meet | port |
|---|---|---|
| torchrun | `MASTER_ADDR`, which it sets | `MASTER_PORT`, which it sets |
| srun | the first host of `SLURM_STEP_NODELIST` | the first of `SLURM_STEP_RESV_PORTS`, else from the job's id |
| mpirun of Open MPI 4 | mpirun's own machine, from `OMPI_MCA_orte_hnp_uri` | from the job's name |
| mpirun of Open MPI 5 | not provided (inside a Slurm job: its first host) | from the job's name |
| mpiexec of MPICH and Intel MPI | not provided (inside a Slurm job: its first host) | 29500 |

`MASTER_ADDR` and `MASTER_PORT` take precedence under every launcher. Processes of one machine meet at 127.0.0.1.
"""

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from mplug.distributed.world import DEFAULT_PORT, LOCALHOST, World
from mplug.errors import UsageError

Environment = Mapping[str, str]

PORTS = range(20000, 30000)
"""Ports derived from a job's id: below the ephemeral ports of Linux (from 32768), which any connection may occupy."""


@dataclass(frozen=True)
class Launcher:
    """The variables by which a launcher describes a process; the functions return None if their variables are unset."""

    name: str
    variables: tuple[str, str, str]
    """The variables of a process's rank, of the number of processes, and of the rank among those of its machine."""
    local_size: Callable[[Environment], int | None]
    remedy: str
    """How to give the processes MASTER_ADDR."""
    job: tuple[str, ...] = ()
    """The variables that together identify the job."""
    address: Callable[[Environment], str | None] = lambda _: None
    port: Callable[[Environment], int] = lambda _: DEFAULT_PORT
    own: tuple[str, ...] = ()
    """Variables besides rank and size by which this launcher is recognized."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Variables that only this launcher sets. If all of them are set, its other variables must be set too."""
        return (*self.variables[:2], *self.own)

    def job_in(self, environment: Environment) -> str:
        """What distinguishes this job from others of the launcher; empty if the launcher gives nothing."""
        return ".".join(environment.get(name, "") for name in self.job)


def launched(environment: Environment = os.environ) -> World | None:
    """The world that torchrun, mpirun or srun has put this process into, or None if the process is alone.

    Raises UsageError for variables that contradict each other or are incomplete, and for processes on several machines
    whose launcher provides no address.
    """
    for launcher in LAUNCHERS:
        if all(name in environment for name in launcher.marks):
            return _world(launcher, environment)
    return None


def _world(launcher: Launcher, environment: Environment) -> World | None:
    rank_in, size_in, local_rank_in = launcher.variables
    size = _number(launcher, environment, size_in)
    if size <= 1:
        return None
    rank, local_rank = (_number(launcher, environment, name) for name in (rank_in, local_rank_in))
    local_size = launcher.local_size(environment)
    if rank >= size or not local_rank < (local_size or size) <= size:
        raise UsageError(
            f"the environment variables of {launcher.name} contradict each other: rank {rank} of {size}, and local "
            f"rank {local_rank} of {local_size or 'an unknown number'} on this machine; unset the variables of an "
            f"earlier launcher"
        )
    address, derived = environment.get("MASTER_ADDR"), False
    if not address and local_size == size:
        address = LOCALHOST
    if not address:
        address, derived = launcher.address(environment), True
    if not address:
        machines = "several machines" if local_size else "an unknown number of machines"
        raise UsageError(
            f"{launcher.name} has started {size} processes on {machines}, and provides no address at which they can "
            f"meet; set MASTER_ADDR to the machine of rank 0: {launcher.remedy}"
        )
    port = _port(environment["MASTER_PORT"]) if environment.get("MASTER_PORT") else launcher.port(environment)
    return World(
        rank, size, local_rank, launcher.name, local_size, address, port, launcher.job_in(environment), derived
    )


def _number(launcher: Launcher, environment: Environment, name: str) -> int:
    value = environment.get(name)
    if value is None or not value.isdecimal():
        fault = f"{name} is not set" if value is None else f"{name}='{value}' is not a number"
        marks = " and ".join(launcher.marks)
        raise UsageError(
            f"{fault}, and {marks} show that {launcher.name} has started this process; set {name}, or unset {marks}"
        )
    return int(value)


def _port(value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) < 2**16:
        raise UsageError(f"MASTER_PORT='{value}' is not a port; set it to a number from 1 to 65535, or unset it")
    return int(value)


# The variables of each launcher.


def _integer(name: str) -> Callable[[Environment], int | None]:
    def read(environment: Environment) -> int | None:
        value = environment.get(name, "")
        return int(value) if value.isdecimal() else None

    return read


def first_host(hosts: str) -> str | None:
    """The first host of a list in Slurm's syntax: `node[01-04,07],gpu3` begins with `node01`; None for no list.

    Several brackets are several dimensions: `rack[2-3]node[0-7]` begins with `rack2node0` (Slurm's `scontrol(1)`,
    "show hostnames").
    """
    if not (first := re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", hosts.strip())):
        return None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def tasks_per_node(tasks: str) -> list[int] | None:
    """The tasks of each node from Slurm's short form: `4(x2),3` is [4, 4, 3]; None for anything else."""
    counts: list[int] = []
    for part in tasks.split(","):
        if not (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())):
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _slurm_local_size(environment: Environment) -> int | None:
    """`SLURM_STEP_TASKS_PER_NODE` at `SLURM_NODEID`, the place of this node in the step."""
    tasks = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _integer("SLURM_NODEID")(environment)
    if tasks is None:
        size = _integer("SLURM_STEP_NUM_TASKS")(environment)
        return size if _integer("SLURM_STEP_NUM_NODES")(environment) == 1 else None
    if node is None or node >= len(tasks):
        return tasks[0] if len(tasks) == 1 else None
    return tasks[node]


def _slurm_address(environment: Environment) -> str | None:
    """The first host of the step, on which Slurm starts task 0.

    The variables of a heterogeneous job are those of one of its components, so they say nothing about task 0.
    """
    if (_integer("SLURM_HET_SIZE")(environment) or 1) > 1:
        return None
    return first_host(environment.get("SLURM_STEP_NODELIST", "")) or _slurm_job_address(environment)


def _slurm_job_address(environment: Environment) -> str | None:
    """The first host of the job: mpirun and the batch script run there."""
    return first_host(environment.get("SLURM_JOB_NODELIST", ""))


def _slurm_port(environment: Environment) -> int:
    """The first port that `srun --resv-ports` has reserved; else one that differs between jobs, and between steps.

    Jobs whose ids differ, modulo 10,000, have different ports in the same step, and so have a job's first nine steps.
    """
    if reserved := re.match(r"\d+", environment.get("SLURM_STEP_RESV_PORTS", "")):
        return _port(reserved[0])
    job, step = (_integer(name)(environment) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return DEFAULT_PORT if job is None else PORTS[(job + 1009 * (step or 0)) % len(PORTS)]


def _open_mpi_address(environment: Environment) -> str | None:
    """mpirun's machine. Open MPI 4 lists its addresses: `1531576320.0;tcp://10.96.0.1,172.17.0.1:34911;tcp6://[...]`.

    Open MPI places rank 0 on mpirun's machine if mpirun may start processes there.
    """
    addresses = [
        address.strip("[]")
        for part in environment.get("OMPI_MCA_orte_hnp_uri", "").split(";")[1:]
        if (match := re.fullmatch(r"tcp6?://(.+):\d+", part))
        for address in match[1].split(",")
    ]
    reachable = [address for address in addresses if _is_reachable(address)]
    return reachable[0] if reachable else _slurm_job_address(environment)


def _is_reachable(address: str) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_link_local)


def _open_mpi_port(environment: Environment) -> int:
    job = environment.get("PMIX_NAMESPACE", "")
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)] if job else DEFAULT_PORT


LAUNCHERS = (
    Launcher(
        "torchrun",
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        _integer("LOCAL_WORLD_SIZE"),
        remedy="export MASTER_ADDR=HOST on every machine",
        job=("TORCHELASTIC_RUN_ID",),
    ),
    Launcher(
        "mpirun",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        _integer("OMPI_COMM_WORLD_LOCAL_SIZE"),
        remedy="mpirun -x MASTER_ADDR=HOST ...",
        job=("PMIX_NAMESPACE",),
        address=_open_mpi_address,
        port=_open_mpi_port,
    ),
    Launcher(
        "mpiexec",
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        _integer("MPI_LOCALNRANKS"),
        remedy="mpiexec -genv MASTER_ADDR HOST ...",
        address=_slurm_job_address,
        own=("MPI_LOCALRANKID",),  # srun --mpi=pmi2 sets the first two variables as well
    ),
    Launcher(
        "srun",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # a batch script has the first, and no step
        _slurm_local_size,
        remedy="export MASTER_ADDR=HOST before srun",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        address=_slurm_address,
        port=_slurm_port,
    ),
)
"""The launchers in the order in which they are looked for: an inner one, such as mpirun inside a Slurm job, first."""
