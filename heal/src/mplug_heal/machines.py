"""The machines of a run, their local disks, and which rank keeps a copy of the local checkpoint of which other one.

Torch-free.
"""

import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

DISK = ".disk"
"""The file in a local folder that holds its identity."""


@dataclass(frozen=True)
class Place:
    """Where a process runs: its host, what fails together with it, and the identity of its local folder."""

    host: str
    machine: Hashable
    disk: str = ""
    error: str = ""
    """Why the local folder cannot be used."""


def place_of_process(folder: str, machine: str | None) -> Place:
    """The place of this process; `folder` and `machine` may name environment variables."""
    host = socket.gethostname()
    named: Hashable = (host, _boot()) if machine is None else expanded(machine)
    for field, text in (("folder", folder), ("machine", machine or "")):
        if "$" in expanded(text):
            return Place(host, named, error=f"the environment lacks a variable of {field}='{text}'")
    path = Path(expanded(folder))
    if not path.is_absolute():
        return Place(host, named, error=f"folder '{path}' is no absolute path")
    try:
        return Place(host if machine is None else f"{host} ({named})", named, _identity(path))
    except OSError as error:
        return Place(host, named, error=f"folder '{path}' cannot be written: {error.strerror}")


def expanded(text: str) -> str:
    """A text with the values of environment variables, and of `~` at its beginning."""
    return os.path.expandvars(Path(text).expanduser())


def refusal(places: Sequence[Place], folder: str) -> str:
    """The reason why local folders cannot be used; empty if they can. The same on all ranks."""
    for rank, place in enumerate(places):
        if place.error:
            return f"rank {rank} on {place.host}: {place.error}"
    hosts: dict[str, Place] = {}
    for place in places:
        other = hosts.setdefault(place.disk, place)
        if other.machine != place.machine:
            return f"{other.host} and {place.host} see the same folder '{folder}'; name one on the disk of each machine"
    return ""


def keepers(machines: Sequence[Hashable]) -> dict[int, int]:
    """For each rank, the rank that keeps a copy of its local checkpoint; empty if there is one machine.

    `machines` has the machine of each rank. Two machines keep the copies of each other, and the last three of an odd
    number do so in a ring. With N machines, one failure loses nothing, and two do with probability 1 / (N - 1): groups
    of two lose less often than a ring of all machines (Gemini, SOSP 2023).
    """
    ranks_of: dict[Hashable, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks_of.setdefault(machine, []).append(rank)
    groups = [*ranks_of.values()]
    if len(groups) == 1:
        return {}
    partners = [groups[_partner(number, len(groups))] for number in range(len(groups))]
    return {
        rank: partner[number % len(partner)]
        for ranks, partner in zip(groups, partners, strict=True)
        for number, rank in enumerate(ranks)
    }


def _partner(number: int, count: int) -> int:
    first = count - 3
    if count % 2 and number >= first:
        return first + (number - first + 1) % 3
    return number ^ 1


def readers(parts_on: Mapping[str, set[int]], disks: Sequence[str], size: int) -> dict[int, list[int]]:
    """For each of `size` parts, the ranks that can read it, the best first; one for each disk that has it.

    `parts_on` are the parts on each disk, and `disks` has the disk of each rank. A rank itself reads the part of its
    number if its disk has it.
    """
    found: dict[int, list[int]] = {}
    for part in range(size):
        own = disks[part] if part < len(disks) else None
        having = sorted((disk for disk, parts in parts_on.items() if part in parts), key=lambda disk: disk != own)
        found[part] = [part if disk == own else _one_of(disks, disk, part) for disk in having]
    return found


def _one_of(disks: Sequence[str], disk: str, number: int) -> int:
    ranks = [rank for rank, other in enumerate(disks) if other == disk]
    return ranks[number % len(ranks)]


def _identity(folder: Path) -> str:
    """The identity of a folder, which is made with it. It shows whether two processes see the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"{DISK}.{uuid4().hex}"
    try:
        own.write_text(own.name)
        with suppress(FileExistsError):
            os.link(own, folder / DISK)
    finally:
        own.unlink(missing_ok=True)
    return (folder / DISK).read_text()


def _boot() -> str:
    """Identifies the running kernel: containers of several machines may have the same host name."""
    with suppress(OSError):  # not Linux
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
