"""Memory of GPUs into which the ranks of a group write rows, and who may have it. N rows, D width, R ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug import Run, UsageError, triton_builds

SETTING, REMEDY = "parallel.ep.dispatch=symmetric", "use parallel.ep.dispatch=bounded or all_to_all"
BYTES_OF_WARP = 32 * 16
"""Bytes that the threads of a warp move at once."""


class Mailbox:
    """Memory of the ranks of a group into which all of them write rows: two in turn.

    A rank writes into one of the two after a barrier that the others reach only when they have read what it had before.
    So all exchanges of a step must be on one stream: the current one, or that of `start`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._memories = (ops.PeerMemory(group), ops.PeerMemory(group))
        self._group, self._next = group, 0
        self._stream: torch.cuda.Stream | None = None
        self._started: dict[int, torch.cuda.Event] = {}

    def restart(self) -> None:
        """Begin with the first of the two memories again. All ranks must have read what the last exchange brought."""
        self._next = 0

    def exchange(self, rows: Tensor, rank: Tensor, place: Tensor, num_places: int) -> Tensor:
        """Write rows [N, D] to their places on their ranks -> what this rank has got [num_places, D].

        Places that no rank writes have what they had. The result is valid until the next exchange but one.
        """
        memory, self._next = self._memories[self._next], 1 - self._next
        shape = (num_places, rows.shape[1])
        memory.reserve(ops.size_of((max(num_places, len(rows)), rows.shape[1]), rows.dtype))
        push(rows, rank, place, memory.addresses())
        memory.barrier()
        return memory.tensor(self._group.rank(), shape, rows.dtype, 0)

    def take(self, arrived: Tensor, written: Tensor) -> Tensor:
        """A copy of what `exchange` has returned, with 0 in the rows that no rank has written (see the function)."""
        return take(arrived, written, torch.empty_like(arrived))

    def start(self, rows: Tensor, rank: Tensor, place: Tensor, written: Tensor | None, num_places: int) -> Tensor:
        """`exchange` and a copy, on a stream of their own -> the copy [num_places, D], undefined until `wait`.

        The rows must not change before. `written` is that of `take`; None: rows that no rank writes are arbitrary.
        """
        current, self._stream = torch.cuda.current_stream(), self._stream or torch.cuda.Stream()
        copies = [one.clone() for one in (rank, place, *(() if written is None else (written,)))]
        into = rows.new_empty(num_places, rows.shape[1])
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            arrived = self.exchange(rows, copies[0], copies[1], num_places)
            _ = into.copy_(arrived) if written is None else take(arrived, copies[2], into)
        for one in (rows, into, *copies):
            one.record_stream(self._stream)
        self._started[into.data_ptr()] = self._stream.record_event()
        return into

    def wait(self, into: Tensor) -> None:
        """Have the current stream wait for what `start` has returned."""
        torch.cuda.current_stream().wait_event(self._started.pop(into.data_ptr()))


def push(rows: Tensor, rank: Tensor, place: Tensor, addresses: Tensor) -> None:
    """Launch the kernel that writes rows to their places."""
    from mplug_ep.pushed_kernel import triton_push_rows

    if len(rows):
        with torch.cuda.device_of(rows):
            triton_push_rows[(len(rows),)](rows, rank, place, addresses, **_sizes(rows))


def take(arrived: Tensor, written: Tensor, rows: Tensor) -> Tensor:
    """Copy arrived [N, D] to rows, with 0 where no rank has written: written [N] int32 is negative. Returns rows."""
    from mplug_ep.pushed_kernel import triton_take_rows

    if len(rows):
        with torch.cuda.device_of(rows):
            triton_take_rows[(len(rows),)](arrived, written, rows, **_sizes(rows))
    return rows


def _sizes(rows: Tensor) -> dict[str, int]:
    """The compile-time constants of a kernel, and its number of warps."""
    width = rows.shape[1]
    padded = 1 << (width - 1).bit_length()
    num_warps = max(1, min(16, padded * rows.element_size() // BYTES_OF_WARP))
    return {"D": width, "WIDTH": padded, "num_warps": num_warps}


MAILBOXES: dict[str, Mailbox] = {}
"""Names of groups -> the memory of the group."""


def open_mailbox(run: Run, group: ops.Group) -> None:
    """Make a mailbox for the ranks of a group, or raise UsageError if the GPUs cannot access each other's memory.

    Collective. It reserves no memory.
    """
    if not run.device.startswith("cuda"):
        raise UsageError(f"{SETTING} writes rows into the memory of other GPUs, and this run is on the CPU; {REMEDY}")
    ops.refuse_healing(run, SETTING, REMEDY)
    if not triton_builds():
        raise UsageError(f"{SETTING} needs Triton and a C compiler on this machine; install them, or {REMEDY}")
    if group is None:
        return
    if not ops.reachable(group):
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        raise UsageError(
            f"{SETTING} needs GPUs of one machine that may access each other's memory, and those of the ranks {ranks}, "
            f"which share experts, may not; {REMEDY}"
        )
    MAILBOXES[group.group_name] = Mailbox(group)
