"""The start of a run of several processes: they meet in a store that rank 0 serves, and rank 0 checks all of them.

Every process publishes its host and devices (`Member`). Rank 0 checks all members and publishes a decision for each
host (`Decision`): a sentence that refuses the run on all ranks, or the data from which a process chooses its number of
threads and its network interface. A rank reads only the decision of its host, whose size does not depend on the number
of hosts.
"""

import json
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.distributed.world import World
from mplug.errors import RunError, UsageError, counted, listed
from mplug_launch.pipes import PortInUse

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

PATIENCE = timedelta(minutes=10)
"""How long a process waits for the others at the start; hosts may load the packages at very different speeds."""


@dataclass(frozen=True)
class Member:
    """The host and the devices of one process of a run."""

    host: str
    machine: str
    """Identifies the kernel: processes with the same value share its CPUs and GPUs, whatever their host names."""
    cpus: tuple[int, ...]
    """The CPUs on which the process may run."""
    device: str
    gpu: str
    """The identity of its GPU; empty on a CPU."""
    num_gpus: int
    """Number of GPUs that the process sees."""
    address: str
    """The address from which the process reaches rank 0's machine; empty if it runs on that machine."""

    @property
    def place(self) -> str:
        """The host: two machines may have the same name, and two containers of a machine different names."""
        return f"{self.host}/{self.machine}"


@dataclass(frozen=True)
class Decision:
    """What rank 0 publishes for the processes of a host once it knows all members."""

    refusal: str | None
    several: bool
    """Whether the processes of the run are on several hosts."""
    cpus: list[list[int]]
    """The CPUs of each process of the run on this machine."""
    elsewhere: str
    """The address of a process on another host; empty if no process knows its own."""


def decide(members: Sequence[Member]) -> Mapping[str, Decision]:
    """The decision for each place, from all members of the run."""
    places = {member.place: member.machine for member in members}
    cpus: dict[str, list[list[int]]] = {}
    for member in members:
        cpus.setdefault(member.machine, []).append(list(member.cpus))
    addresses = list({member.place: member.address for member in reversed(members) if member.address}.items())
    refusal = _refusal(members)

    def elsewhere(place: str) -> str:
        return next((address for other, address in addresses[:2] if other != place), "")

    return {
        place: Decision(refusal, len(places) > 1, cpus[machine], elsewhere(place)) for place, machine in places.items()
    }


def _refusal(members: Sequence[Member]) -> str | None:
    first = members[0]
    for rank, member in enumerate(members):
        if member.device != first.device:
            return (
                f"rank {rank} on {member.host} computes on '{member.device}', and rank 0 on {first.host} computes on "
                f"'{first.device}'; make GPUs visible on all machines, or set trainer.device=cpu"
            )
    users = Counter((member.machine, member.gpu) for member in members if member.gpu)
    for rank, member in enumerate(members):
        if member.gpu and users[member.machine, member.gpu] > 1:
            processes = sum(other.machine == member.machine for other in members)
            return (
                f"{users[member.machine, member.gpu]} processes on {member.host} compute on the same GPU: {processes} "
                f"processes run on this machine, and rank {rank} sees {counted(member.num_gpus, 'GPU')}; start fewer "
                f"processes, make more GPUs visible, or set trainer.device=cpu"
            )
    return None


GPU = "MPLUG_GPU"
"""The variable of a process whose GPU does not follow from its rank: its rank has changed after a death."""


def gpu_of(local_rank: int, num_gpus: int) -> int:
    """The index of a process's GPU among those that it sees.

    With srun's `--gpus-per-task` or `--gpu-bind` each process sees GPUs of its own, which are numbered from 0. Whether
    two processes have chosen the same GPU is checked when all have met.
    """
    return local_rank % num_gpus


def num_threads(own: Sequence[int], everyone: Iterable[Sequence[int]], default: int) -> int:
    """The threads of a process: its share of the CPUs on which it may run, at least one.

    `own` are its CPUs, `everyone` those of every process of the machine, itself included. A CPU that several processes
    may use counts as a fraction. `default` is the number of threads for all CPUs of `own`: torch does not use
    hyperthreads, for instance.
    """
    users = Counter(cpu for cpus in everyone for cpu in cpus)
    share = sum(1 / users[cpu] for cpu in own) / len(own)
    return max(1, int(default * share + 1e-6))


# The description of the current process.


def member(address: str, device: str, gpu: str, num_gpus: int) -> Member:
    """This process; `address` is that of rank 0's machine."""
    cpus = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    cpus = cpus or tuple(range(os.cpu_count() or 1))
    return Member(socket.gethostname(), _machine(), cpus, device, gpu, num_gpus, source_towards(address))


def _machine() -> str:
    """Identifies the running kernel: containers on one machine share CPUs though their host names differ."""
    with suppress(OSError):  # not Linux
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def source_towards(address: str) -> str:
    """This machine's address for packets to another address; empty if they would not leave the machine by a network.

    No packet is sent: to connect a UDP socket only chooses the route.
    """
    try:
        targets = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, target in targets:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:  # no route there: try the next
            probe.connect(target)
            source = str(probe.getsockname()[0]).partition("%")[0]
            if not ip_address(source).is_loopback:
                return source
    return ""


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address of this machine."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(candidate.address.partition("%")[0] == address for candidate in addresses):
            return str(name)
    return None


def interfaces(world: World, own: Member, decision: Decision) -> dict[str, str]:
    """The variables that make gloo and NCCL use the interface by which the machines reach each other.

    Without them gloo uses the address of the host name, which is 127.0.1.1 on Debian, and NCCL an interface that may
    lead nowhere, such as a virtual machine's bridge. Variables that the user has set stay.
    """
    if not decision.several:
        return {}
    address = own.address or source_towards(decision.elsewhere)
    if not address:
        raise UsageError(
            f"MASTER_ADDR='{world.address}' is an address that only {own.host} itself can reach; set it to a host name "
            f"or an address of rank 0's machine that all machines can reach"
        )
    name = interface_of(address)
    variables = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
    return {variable: value for variable, value in variables.items() if not os.environ.get(variable)}


# The store.


def open_store(world: World) -> "Store":
    """The store by which the processes of a world meet; rank 0, or torchrun's agent, serves it."""
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    if world.derived and world.rank == 0:
        _refuse_other_machine(world)
    os.environ |= world.environment
    serves = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(
            world.address,
            world.port,
            world.size,
            is_master=serves,
            timeout=PATIENCE,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (DistError, OSError) as error:
        if serves and "EADDRINUSE" in str(error):
            raise PortInUse(
                f"port {world.port} of {socket.gethostname()}, at which the processes would meet, is in use; set "
                f"MASTER_PORT to a free port, the same on all machines"
            ) from None
        raise RunError(
            f"rank {world.rank} on {socket.gethostname()} has not reached rank 0 at {world.address}, port "
            f"{world.port}, within {PATIENCE.seconds} s; see rank 0's output, check that no firewall blocks the port, "
            f"or set another address by MASTER_ADDR and MASTER_PORT"
        ) from error


def _refuse_other_machine(world: World) -> None:
    """Rank 0 serves the store, so a derived address must be one of its machine's own."""
    try:
        targets = socket.getaddrinfo(world.address, 0, type=socket.SOCK_STREAM)
    except OSError:
        targets = []
    for family, kind, protocol, _, target in targets:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
            return
    raise UsageError(
        f"{world.launcher}'s variables give '{world.address}' as the address at which the processes meet, and rank 0 "
        f"runs on {socket.gethostname()}, where this is {'another machine' if targets else 'an unknown host'}; set "
        f"MASTER_ADDR to an address of rank 0's machine"
    )


def meet(world: World, store: "Store", own: Member) -> Decision:
    """Publish this process's member, and return rank 0's decision for its host.

    Raises UsageError, with the same text on every rank, if the processes cannot work together.
    """
    from torch.distributed.constants import default_pg_timeout

    store.set(f"member_{world.rank}", json.dumps(asdict(own)))
    if world.rank == 0:
        members = [_member(value) for value in _all_members(world, store)]
        for place, decision in decide(members).items():
            store.set(f"decision_{place}", json.dumps(asdict(decision)))
    key = f"decision_{own.place}"
    try:
        store.wait([key], PATIENCE)
    except RuntimeError as error:
        raise RunError(
            f"rank {world.rank} on {own.host} has waited {PATIENCE.seconds} s for rank 0; see rank 0's output"
        ) from error
    decision = Decision(**json.loads(store.get(key)))
    store.set_timeout(default_pg_timeout)
    if decision.refusal is not None:
        raise UsageError(decision.refusal)
    return decision


def _all_members(world: World, store: "Store") -> list[bytes]:
    """The published member of every rank; RunError names the ranks that have published none."""
    keys = [f"member_{rank}" for rank in range(world.size)]
    try:
        store.wait(keys, PATIENCE)
    except RuntimeError as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise RunError(
            f"rank 0 has waited {PATIENCE.seconds} s at {world.address}, port {world.port}, for "
            f"{'rank' if len(missing) == 1 else 'ranks'} {listed(missing)} of {world.size}; see their output"
        ) from error
    return list(store.multi_get(keys))


def _member(value: bytes) -> Member:
    fields = json.loads(value)
    return Member(**{**fields, "cpus": tuple(fields["cpus"])})
