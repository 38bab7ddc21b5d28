"""The memory of this machine and of this process's control groups (v1 and v2), as Linux states them. Imports no torch.

A container is a control group: the kernel kills a process that exceeds its limit, whatever the machine has.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60
"""Limits from here on mean that there is no limit: version 1 writes the largest multiple of a page."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of main memory that processes may use: in `total`, and `available` now; swap space; and where that is from.

    A figure that the system does not state is None.
    """

    total: int | None
    available: int | None
    swap: int | None
    source: str


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The main memory of this machine, or the tightest limit of a control group around this process."""
    facts = _meminfo(root / "proc/meminfo")
    total, available, source = facts.get("MemTotal"), facts.get("MemAvailable"), "this machine"
    for limit, used in control_group_limits(root):
        if total is None or limit < total:
            total, source = limit, "its control group (a container or a job)"
        if used is not None:
            free = max(limit - used, 0)
            available = free if available is None else min(available, free)
    return HostMemory(total, available, facts.get("SwapFree"), source)


def control_group_limits(root: Path = Path("/")) -> list[tuple[int, int | None]]:
    """(limit, bytes in use that cannot be reclaimed) of each control group around this process that has a limit."""
    found = []
    for folder, limit_file, usage_file, cache in _groups(root):
        limit = _number(folder / limit_file)
        if limit is None or limit >= UNLIMITED:
            continue
        usage, reclaimable = _number(folder / usage_file), _statistic(folder / "memory.stat", cache)
        found.append((limit, None if usage is None else max(usage - reclaimable, 0)))
    return found


def _groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """(folder, file of the limit, file of the usage, statistic of reclaimable cache) of each group and its parents."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, name = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            top, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container, the name may be that on the host, and the mounted top is the container's own group.
        names = [part for part in name.split("/") if part not in ("", "..")]
        for depth in range(len(names), -1, -1):
            yield top.joinpath(*names[:depth]), *files


def _meminfo(path: Path) -> dict[str, int]:
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) == 3 and row[1].isdigit()}


def _statistic(path: Path, name: str) -> int:
    rows = [line.split() for line in _text(path).splitlines()]
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name and row[1].isdigit()), 0)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """The text of a file of the system; empty if it has none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
