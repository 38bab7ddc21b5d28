"""Rows of weights in memory from which the other ranks copy them: copy engines gather weights beside the products.

    a version of the weights begins    a rank writes its rows of a unit, in the precision of the run, and signals it
    each gathering of the unit         the other ranks copy the rows from there into their whole weights
    the version ends                   a rank writes again when all others have copied what they need of the last one

NCCL gathers with kernels, which take multiprocessors from the products beside them. A copy between GPUs takes none.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import mplug_ops as ops
from mplug import UsageError
from mplug_ops.lanes import Lane, wait_for

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mplug import Run

SETTING, REMEDY = "a transport=copy_engines of parallel.fsdp", "set transport and sum_transport to messages"


def require_copies(run: "Run", group: "ProcessGroup") -> None:
    """Raise UsageError if the ranks of the group cannot copy from each other's memory. Collective."""
    if not run.device.startswith("cuda"):
        raise UsageError(f"{SETTING} copies between GPUs, and this run is on the CPU; {REMEDY}")
    if not ops.reachable(group):
        ranks = ", ".join(map(str, torch.distributed.get_process_group_ranks(group)))
        raise UsageError(
            f"{SETTING} needs GPUs of one machine that may access each other's memory, and those of the ranks {ranks}, "
            f"which share weights, may not; {REMEDY}"
        )


class PeerRows:
    """This rank's rows of all units in one memory. One use of the memory lasts for one version of the weights.

    `lane` is the stream on which rows are written; copies have a stream of their own, in which no sum of gradients
    delays them.
    """

    def __init__(self, group: "ProcessGroup", lane: Lane, device: torch.device) -> None:
        self._memory, self._rank, self._size = ops.SignalledMemory(group), group.rank(), group.size()
        self._lane, self._copies = lane, Lane(device)
        self._num_bytes = 0
        self._places = list[list[tuple[tuple[int, ...], torch.dtype, int]]]()
        self._written = dict[int, torch.cuda.Event | None]()

    def add(self, parts: Sequence[Tensor]) -> int:
        """Make room for a rank's rows of a unit, whose whole tensors are parts [R, n] -> the number of the unit."""
        places = []
        for part in parts:
            places.append((tuple(part.shape[1:]), part.dtype, self._num_bytes))
            self._num_bytes += ops.size_of(tuple(part.shape[1:]), part.dtype)
        self._places.append(places)
        return len(self._places) - 1

    def gather(
        self, unit: int, parts: Sequence[Tensor], write: Callable[[list[Tensor]], None]
    ) -> "torch.cuda.Event | None":
        """Start to gather parts [R, n] of a unit -> the end of it. `write` writes own rows, once for each version.

        Collective; all ranks gather the units of a new version in the same order.
        """
        if unit not in self._written:
            self._write(unit, write)
        with self._copies.entered():
            for step in range(1, self._size):
                other = (self._rank + step) % self._size
                self._memory.hear(self._copies.stream, other, unit)
                for part, rows in zip(parts, self._rows(unit, other), strict=True):
                    part[other].copy_(rows)
            wait_for(self._written[unit])
            torch._foreach_copy_([part[self._rank] for part in parts], self._rows(unit, self._rank))
            return self._copies.mark()

    def _write(self, unit: int, write: Callable[[list[Tensor]], None]) -> None:
        with self._lane.entered():
            if not self._written:
                self._memory.begin(self._num_bytes, self._lane.stream)
            write(self._rows(unit, self._rank))
            for step in range(1, self._size):
                self._memory.tell(self._lane.stream, (self._rank + step) % self._size, unit)
            self._written[unit] = self._lane.mark()

    def _rows(self, unit: int, rank: int) -> list[Tensor]:
        return [self._memory.tensor(rank, *place) for place in self._places[unit]]

    def forget(self) -> None:
        """End a version: this rank has copied all rows of the others that it needs."""
        if self._written:
            with self._copies.entered():
                self._memory.end(self._copies.stream)
            self._written.clear()
