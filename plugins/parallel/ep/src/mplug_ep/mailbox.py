"""Memory of GPUs into which the ranks of a group write rows, and who may have it. N rows, D width, R ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

import mplug_ops as ops
from mplug import Run, UsageError, triton_builds

SETTING, REMEDY = "parallel.ep.dispatch=symmetric", "use parallel.ep.dispatch=bounded or all_to_all"
BYTES_OF_WARP = 32 * 16
"""Bytes that the threads of a warp move at once."""


class Turns:
    """Which memory an exchange gets, by number, so that no rank writes into one that another rank has yet to read.

    An exchange ends with a barrier of all ranks, which follows what a rank has read before it started the exchange. So
    a memory is free if another exchange has started since it was read. If none is free, there is a new one. All ranks
    start and read exchanges in the same order, whatever it is: a compiler may choose it. So they agree on the memories.
    """

    def __init__(self) -> None:
        self._starts, self._read = 0, list[int | None]()

    def start(self) -> int:
        """The memory of the next exchange."""
        before, self._starts = self._starts, self._starts + 1
        free = (number for number, read in enumerate(self._read) if read is not None and read < before)
        number = next(free, len(self._read))
        self._read[number : number + 1] = [None]
        return number

    def has_read(self, number: int) -> None:
        """State that this rank reads a memory before it starts the next exchange."""
        self._read[number] = self._starts

    def restart(self) -> None:
        """Begin with the first memory again. All ranks must have read all of them."""
        self._starts, self._read = 0, [-1] * len(self._read)


class Mailbox:
    """Memory of the ranks of a group into which all of them write rows: two in turn, or more while rows travel.

    All exchanges of a step must be on one stream: the current one (`exchange`), or that of `start`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._memories, self._turns = list[ops.PeerMemory](), Turns()
        self._group = group
        self._stream: torch.cuda.Stream | None = None
        self._started: dict[int, tuple[int, Tensor, torch.cuda.Event]] = {}

    def restart(self) -> None:
        """Begin with the first of the memories again. All ranks must have read what all exchanges brought."""
        self._turns.restart()

    def exchange(self, rows: Tensor, rank: Tensor, place: Tensor, num_places: int) -> Tensor:
        """Write rows [N, D] to their places on their ranks -> what this rank has got [num_places, D].

        Places that no rank writes have what they had. The result is valid until the next exchange but one.
        """
        number, arrived = self._exchanged(rows, rank, place, num_places)
        self._turns.has_read(number)
        return arrived

    def _exchanged(self, rows: Tensor, rank: Tensor, place: Tensor, num_places: int) -> tuple[int, Tensor]:
        """(the number of the memory, what this rank has got), on the current stream."""
        number = self._turns.start()
        if number == len(self._memories):
            self._memories.append(ops.PeerMemory(self._group))
        memory, shape = self._memories[number], (num_places, rows.shape[1])
        memory.reserve(ops.size_of((max(num_places, len(rows)), rows.shape[1]), rows.dtype))
        push(rows, rank, place, memory.addresses())
        memory.barrier()
        return number, memory.tensor(self._group.rank(), shape, rows.dtype, 0)

    def take(self, arrived: Tensor, written: Tensor | None) -> Tensor:
        """A copy of what `exchange` has returned, with 0 in the rows that no rank has written (see the function).

        `written` None: these rows are arbitrary.
        """
        return arrived.clone() if written is None else take(arrived, written)

    def start(self, rows: Tensor, rank: Tensor, place: Tensor, num_places: int) -> Tensor:
        """Start `exchange` on a stream of its own -> a tensor [num_places, D] without content, for `wait`.

        The rows must not change before.
        """
        current, self._stream = torch.cuda.current_stream(), self._stream or torch.cuda.Stream()
        rank, place, ticket = rank.clone(), place.clone(), rows.new_empty(num_places, rows.shape[1])
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            number, arrived = self._exchanged(rows, rank, place, num_places)
        for one in (rows, rank, place):
            one.record_stream(self._stream)
        self._started[ticket.data_ptr()] = number, arrived, self._stream.record_event()
        return ticket

    def wait(self, ticket: Tensor, written: Tensor | None) -> Tensor:
        """Have the current stream wait for an exchange that `start` has begun -> the result of `take`."""
        number, arrived, event = self._started.pop(ticket.data_ptr())
        torch.cuda.current_stream().wait_event(event)
        self._turns.has_read(number)
        return self.take(arrived, written)


def push(rows: Tensor, rank: Tensor, place: Tensor, addresses: Tensor) -> None:
    """Launch the kernel that writes rows to their places."""
    from mplug_ep.pushed_kernel import triton_push_rows

    if len(rows):
        with torch.cuda.device_of(rows):
            triton_push_rows[(len(rows),)](rows, rank, place, addresses, **_sizes(rows))


def take(arrived: Tensor, written: Tensor) -> Tensor:
    """A copy of arrived [N, D], with 0 in the rows that no rank has written: written [N] int32 is negative."""
    from mplug_ep.pushed_kernel import triton_take_rows

    rows = torch.empty_like(arrived)
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
