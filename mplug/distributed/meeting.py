"""How the processes of a run meet: the store that rank 0 serves, and what each process learns there about the others.

Every process publishes where it runs (`Member`). Rank 0 checks all of them and publishes a decision for each host
(`Decision`): a sentence that refuses the run on all ranks, or what each process needs to choose its threads and its
network interface. A rank reads only the decision of its host, whose size does not depend on the number of hosts.
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

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

PATIENCE = timedelta(minutes=10)
"""How long a process waits for the others at the start: file systems deliver the same packages at different speeds."""


@dataclass(frozen=True)
class Member:
    """Where one process of a run runs."""

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
    """Its own address on the way to rank 0's machine; empty if that way does not leave the machine."""

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
    """For each place what its processes need to know about the others, or the sentence that refuses them."""
    places = {one.place: one.machine for one in members}
    cpus: dict[str, list[list[int]]] = {}
    for one in members:
        cpus.setdefault(one.machine, []).append(list(one.cpus))
    known = list({one.place: one.address for one in reversed(members) if one.address}.items())
    refusal = _refusal(members)

    def elsewhere(place: str) -> str:
        return next((address for other, address in known[:2] if other != place), "")

    return {
        place: Decision(refusal, len(places) > 1, cpus[machine], elsewhere(place)) for place, machine in places.items()
    }


def _refusal(members: Sequence[Member]) -> str | None:
    first = members[0]
    for rank, one in enumerate(members):
        if one.device != first.device:
            return (
                f"rank {rank} on {one.host} computes on '{one.device}', and rank 0 on {first.host} on "
                f"'{first.device}'; make GPUs visible on all machines, or set trainer.device=cpu"
            )
    shared = Counter((one.machine, one.gpu) for one in members if one.gpu)
    for rank, one in enumerate(members):
        if one.gpu and shared[one.machine, one.gpu] > 1:
            processes = sum(other.machine == one.machine for other in members)
            return (
                f"{shared[one.machine, one.gpu]} processes on {one.host} compute on the same GPU: "
                f"rank {rank} is one of {processes} processes there, and sees {counted(one.num_gpus, 'GPU')}; use "
                f"fewer processes, more GPUs, or trainer.device=cpu"
            )
    return None


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


# What a process knows about itself.


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
        found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, target in found:
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
        if any(one.address.partition("%")[0] == address for one in addresses):
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
            f"MASTER_ADDR is '{world.address}', which other machines than {own.host} cannot reach; set it to a host "
            f"name or an address of rank 0's machine that all machines can reach"
        )
    name = interface_of(address)
    found = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
    return {variable: value for variable, value in found.items() if not os.environ.get(variable)}


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
            raise UsageError(
                f"port {world.port} of {socket.gethostname()}, where the processes meet, is in use; set MASTER_PORT "
                f"to a free port on all machines"
            ) from None
        raise RunError(
            f"rank {world.rank} on {socket.gethostname()} has not reached rank 0 at {world.address}, port "
            f"{world.port}, within {PATIENCE.seconds} s; see rank 0's output, and whether a firewall is between them "
            f"(MASTER_ADDR and MASTER_PORT choose another way)"
        ) from error


def _refuse_other_machine(world: World) -> None:
    """Rank 0 serves the store, so a derived address must be one of its machine's own."""
    try:
        found = socket.getaddrinfo(world.address, 0, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, protocol, _, target in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
            return
    raise UsageError(
        f"rank 0 runs on {socket.gethostname()}, and by {world.launcher}'s variables the processes would meet at "
        f"'{world.address}', which is {'another machine' if found else 'unknown there'}; set MASTER_ADDR to an address "
        f"of rank 0's machine"
    )


def meet(world: World, store: "Store", own: Member) -> Decision:
    """Publish where this process runs, and return what rank 0 decides about all.

    Raises UsageError, on every rank the same, where the processes cannot work together.
    """
    from torch.distributed.constants import default_pg_timeout

    store.set(f"member_{world.rank}", json.dumps(asdict(own)))
    if world.rank == 0:
        members = [_member(value) for value in _all(world, store)]
        for place, decision in decide(members).items():
            store.set(f"decision_{place}", json.dumps(asdict(decision)))
    key = f"decision_{own.place}"
    try:
        store.wait([key], PATIENCE)
    except RuntimeError as error:
        raise RunError(
            f"rank {world.rank} on {own.host} has waited {PATIENCE.seconds} s for rank 0 to begin; its error is in the "
            f"output of rank 0"
        ) from error
    decision = Decision(**json.loads(store.get(key)))
    store.set_timeout(default_pg_timeout)
    if decision.refusal is not None:
        raise UsageError(decision.refusal)
    return decision


def _all(world: World, store: "Store") -> list[bytes]:
    """What every rank has published; RunError names those that have not come."""
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
