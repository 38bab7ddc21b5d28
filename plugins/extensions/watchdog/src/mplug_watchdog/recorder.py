"""The collectives that ranks have entered, from torch's flight recorder: which rank is missing from which collective.

Torch keeps the last collectives of each process in a ring buffer (TORCH_FR_BUFFER_SIZE entries): group, sequence
number, operation, sizes and state. When a process makes no progress, its heartbeats contain the last collective of each
of its groups, and the error of the watchdog names the ranks that have not entered the one for which the others wait.
NCCL's recorder also states whether a collective is complete; that of gloo does not.

    python -m mplug_watchdog.recorder FILES    analyses dumps that NCCL has written, one file per rank

The rules are those of the page "Flight Recorder" of torch's documentation, and of the CollectiveAnalyzer of NVIDIA's
resiliency extension: match collectives of a group by their numbers; a rank that waits in another group is a victim.
"""

import json
import logging
import os
import pickle
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mplug import listed

log = logging.getLogger("mplug")
VARIABLE = "TORCH_FR_BUFFER_SIZE"
DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
"""Functions of torch that return the recorders of NCCL and of the other backends, as pickles."""
EQUAL_SIZES = ("all_reduce", "allreduce", "broadcast")
"""Collectives whose sizes are equal on all ranks."""


@dataclass(frozen=True)
class Entered:
    """The last collective of a process group that a rank has entered."""

    group: str
    ranks: tuple[int, ...]
    """The ranks of the group, ascending."""
    number: int
    name: str
    sizes: str
    is_complete: bool | None
    """None if the recorder does not know it (gloo)."""


def record(entries: int) -> None:
    """Let torch keep the last `entries` collectives. Call it before a process group exists; a user's setting stays."""
    os.environ.setdefault(VARIABLE, str(entries))


def last_entered() -> list[dict[str, Any]]:
    """The last collective of each group of this process, as plain data for a heartbeat. Any thread may call it.

    If torch's recorder cannot be read, the log says so, and heartbeats go on without it.
    """
    try:
        return [asdict(one) for one in _of_this_process()]
    except (RuntimeError, LookupError, TypeError, ValueError, pickle.UnpicklingError):
        log.exception("torch's flight recorder cannot be read")
        return []


def _of_this_process() -> list[Entered]:
    import torch
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    ranks = {name: tuple(sorted(world.pg_group_ranks.get(group) or ())) for group, name in list(world.pg_names.items())}
    found: list[Entered] = []
    for function in DUMPS:
        dump = getattr(torch._C._distributed_c10d, function, None)
        if dump is not None:
            arguments = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
            found += entered(pickle.loads(dump(**arguments)), ranks)
    return found


def entered(dump: Mapping[str, Any], ranks: Mapping[str, Sequence[int]] | None = None) -> list[Entered]:
    """The last collective of each group in a dump; of NCCL's groups the first one that is not complete.

    `ranks` are the ranks of each group by its name; by default, those in the dump. Sends and receives of single
    messages are left out, because they have no number that both sides share.
    """
    if ranks is None:
        configs = {key: one for key, one in dump.get("pg_config", {}).items() if isinstance(one, dict)}
        ranks = {str(one.get("name", key)): tuple(json.loads(one["ranks"])) for key, one in configs.items()}
    last: dict[tuple[str, str], Entered] = {}
    for entry in dump.get("entries", ()):
        name, description = (str(word) for word in entry["process_group"])
        if entry.get("is_p2p") or not ranks.get(name):
            continue
        operation = str(entry["profiling_name"])
        is_complete = None if operation.startswith("gloo:") else entry["state"] == "completed"
        one = Entered(
            description if description not in ("", "undefined") else name,
            tuple(sorted(ranks[name])),
            int(entry["collective_seq_id"]),
            operation.partition(":")[2] or operation,
            str(entry["input_sizes"]),
            is_complete,
        )
        before = last.get((name, description))
        if before is None or before.is_complete is not False:
            last[name, description] = one
    return list(last.values())


def of_beat(data: Mapping[str, Any]) -> Entered:
    """A collective from the data of a heartbeat, in which JSON may have made lists of tuples."""
    return Entered(**{**data, "ranks": tuple(data["ranks"])})


@dataclass(frozen=True)
class Missing:
    """A collective that some ranks have entered (`waiting`), and others have not."""

    entered: Entered
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


def analysis(by_rank: Mapping[int, Iterable[Entered]], silent: Iterable[int] = ()) -> str:
    """A clause that says which ranks have not entered which collective; '' if the records do not show it.

    `by_rank` are the last collectives of each rank that has reported; `silent` are ranks that have not.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, Entered]] = {}
    for rank, collectives in by_rank.items():
        for one in collectives:
            groups.setdefault((one.group, one.ranks), {})[rank] = one
    if found := [clause for of_group in groups.values() if (clause := _different(of_group))]:
        return found[0]
    behind = [one for of_group in groups.values() for one in _missing(of_group, set(silent))]
    if behind:
        return _clause(_earliest(behind))
    stuck = [of_group for of_group in groups.values() if all(one.is_complete is False for one in of_group.values())]
    stuck = [of_group for of_group in stuck if len(of_group) == len(next(iter(of_group.values())).ranks)]
    if not stuck:
        return ""
    one = next(iter(min(stuck, key=len).values()))
    return (
        f"all ranks of group '{one.group}' have entered {_name(one)}, and none has completed it: a GPU or the network "
        f"between them does not answer"
    )


def _missing(of_group: Mapping[int, Entered], silent: set[int]) -> list[Missing]:
    """The ranks of a group that are behind the others, if there are any."""
    last = max(of_group.values(), key=lambda one: one.number)
    waiting = tuple(rank for rank, one in of_group.items() if one.number == last.number and one.is_complete is not True)
    absent = [
        rank for rank in last.ranks if rank in silent or (rank in of_group and of_group[rank].number < last.number)
    ]
    return [Missing(last, waiting, tuple(absent))] if waiting and absent else []


def _earliest(behind: Sequence[Missing]) -> Missing:
    """The group on which the others depend: its missing ranks wait in no other group; of these, the smallest."""
    waiting = {rank for one in behind for rank in one.waiting}
    causes = [one for one in behind if not waiting.issuperset(one.missing)] or list(behind)
    return min(causes, key=lambda one: len(one.entered.ranks))


def _clause(one: Missing) -> str:
    verb = "has" if len(one.missing) == 1 else "have"
    wait = "waits" if len(one.waiting) == 1 else "wait"
    return (
        f"{_ranks(one.missing)} {verb} not entered {_name(one.entered)} of group '{one.entered.group}', in which "
        f"{_ranks(one.waiting)} {wait}"
    )


def _different(of_group: Mapping[int, Entered]) -> str:
    """A clause about ranks that have entered different operations as the same collective; '' if there are none."""
    last = max(one.number for one in of_group.values())
    at = {rank: one for rank, one in of_group.items() if one.number == last}
    kinds: dict[tuple[str, str], list[int]] = {}
    for rank, one in at.items():
        kinds.setdefault((one.name, one.sizes if one.name in EQUAL_SIZES else ""), []).append(rank)
    if len(kinds) < 2:
        return ""
    parts = [f"{_ranks(ranks)} as {f'{name} {sizes}'.strip()}" for (name, sizes), ranks in kinds.items()]
    group = next(iter(at.values())).group
    return f"collective {last} of group '{group}' is entered by {listed(parts)}: the ranks run different programs"


def _name(one: Entered) -> str:
    return f"{one.name} number {one.number}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(map(str, sorted(ranks)))}"


def of_files(paths: Iterable[Path]) -> str:
    """The analysis of dumps in files whose names end in the number of the rank, as NCCL writes them.

    Only read files that you trust: a pickle can run code.
    """
    by_rank = {}
    for path in paths:
        digits = re.search(r"(\d+)$", path.stem)
        if digits is None:
            raise ValueError(f"the name of '{path}' does not end in the number of a rank")
        by_rank[int(digits[1])] = entered(pickle.loads(path.read_bytes()))
    everyone = {rank for collectives in by_rank.values() for one in collectives for rank in one.ranks}
    return analysis(by_rank, everyone - set(by_rank))


if __name__ == "__main__":
    print(of_files(map(Path, sys.argv[1:])) or "no rank is missing from a collective that another rank waits in")
