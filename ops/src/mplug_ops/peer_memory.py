"""Memory that all GPUs of a group access directly (torch's symmetric memory), without NVLink multicast. R ranks.

A `PeerMemory` is such memory on every rank, without an order between its accesses but `barrier`. A `SignalledMemory`
has words for signals in front: a rank writes to its own data, and to the words of all ranks. A use of it begins when
all ranks have finished their last use of it.
"""

import logging
import os
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.distributed import distributed_c10d as c10d

from mplug import UsageError
from mplug_ops.peer_signals import available, await_word, raise_word

if TYPE_CHECKING:
    from mplug import Run

log = logging.getLogger("mplug")
symmetric: Any = _symmetric_memory

HEADER = 1 << 16
"""Bytes of words in front of the data of a `SignalledMemory`: [channel, R] words of 4 bytes."""
ALIGNED = 512
FINISHED = 0
"""The channel on which a rank counts the uses of the memory that it has finished."""
FIRST = 1
"""The channel 0 of `tell` and `hear`."""
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def aligned(num_bytes: int) -> int:
    """A number of bytes, rounded up to a multiple that suits every dtype and copy."""
    return -(-num_bytes // ALIGNED) * ALIGNED


def reachable(group: dist.ProcessGroup) -> bool:
    """Whether the current GPU of every rank of the group can access the memory of all others. Collective."""
    own: tuple[Any, ...] = ("", "", [], False)
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        others = [other for other in range(torch.cuda.device_count()) if other != device]
        near = [_uuid(other) for other in others if torch.cuda.can_device_access_peer(device, other)]
        own = (f"{os.uname().nodename} {_boot_id()}", _uuid(device), near, available())
    found: list[tuple[str, str, list[str], bool]] = _all(own, group)
    (host, *_), devices = found[0], {device for _, device, _, _ in found}
    same_host = all(other == host and signals for other, _, _, signals in found)
    if not same_host or len(devices) < len(found) or any(devices - {one, *near} for _, one, near, _ in found):
        return False
    return all(_all(_can_share(group), group))


def refuse_healing(run: "Run", setting: str, remedy: str) -> None:
    """Raise UsageError for a setting that uses such memory, if the run is to go on after the death of a process.

    A stream that waits for a signal of a dead process waits for ever: nothing can end that wait, as it ends a message.
    And torch keeps the memory's ranks by the name of a group, which a group of the next attempt may have.
    """
    if healers := run.hooks.implementers("heal"):
        raise UsageError(
            f"{setting} waits for signals between GPUs, and a process that waits for a dead one cannot go on "
            f"({healers[0]}); {remedy}, or leave {healers[0]} out"
        )


def _all(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """The ranks' objects."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    return found


def _can_share(group: dist.ProcessGroup) -> bool:
    """Whether this process may map the memory of the others: a container can forbid it."""
    try:
        SignalledMemory(group).begin(ALIGNED, torch.cuda.current_stream())
    except RuntimeError as error:
        log.warning("GPUs cannot share memory: %s", error)
        return False
    return True


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _boot_id() -> str:
    """A word that two machines with the same host name do not share."""
    path = "/proc/sys/kernel/random/boot_id"
    if not os.path.exists(path):
        return ""
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def _join(group: dist.ProcessGroup) -> str:
    """Make the group known to symmetric memory, by a store whose keys are the same on all its ranks."""
    name: str = group.group_name
    if name not in symmetric._group_name_to_store:
        ranks = "_".join(map(str, dist.get_process_group_ranks(group)))
        store: Any = c10d.PrefixStore(f"mplug-{ranks}", c10d._get_default_store())
        symmetric._group_name_to_store[name] = store
        symmetric._SymmetricMemory.set_group_info(name, group.rank(), group.size(), store)
    return name


@dataclass
class PeerMemory:
    """Memory of equal size on every rank of a group; none before the first `reserve`."""

    group: dist.ProcessGroup
    capacity: int = field(default=0, init=False)
    """Bytes of data per rank."""
    _header: ClassVar[int] = 0
    _memory: tuple[Any, ...] = field(default=(), init=False)
    _addresses: tuple[int, ...] = field(default=(), init=False)
    _views: dict[tuple[Any, ...], Tensor] = field(default_factory=dict, init=False)

    def reserve(self, num_bytes: int) -> None:
        """Make room for `num_bytes` of data per rank; all contents are lost if the memory must grow.

        Collective, with the same number on all ranks. It makes the CPU wait only if the memory must grow.
        """
        if num_bytes <= self.capacity:
            return
        os.environ.setdefault(NO_MULTICAST, "1")  # torch then maps no multicast object, which nothing here would use
        device, name = torch.device("cuda", torch.cuda.current_device()), _join(self.group)
        torch.cuda.synchronize(device)  # no rank still accesses the memory that this one frees
        size = self._header + aligned(num_bytes)
        memory = symmetric._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        memory[: self._header].zero_()
        torch.cuda.synchronize(device)
        # Returns when all ranks are here: their last uses have ended, and their words are zero.
        handle = symmetric._SymmetricMemory.rendezvous(memory, name)
        self._memory, self._addresses = (memory, handle), tuple(handle.buffer_ptrs)
        self.capacity, self._views = size - self._header, {}

    def tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        """The tensor at an offset in bytes of a rank's data."""
        key = rank, shape, dtype, offset
        if key not in self._views:
            start = (self._header + offset) // dtype.itemsize
            self._views[key] = self._memory[1].get_buffer(rank, shape, dtype, start)
        return self._views[key]

    def addresses(self) -> Tensor:
        """The addresses [R] int64, on the GPU, of the ranks' data."""
        if () not in self._views:
            found = [address + self._header for address in self._addresses]
            self._views[()] = torch.tensor(found, dtype=torch.int64, device=self._memory[0].device)
        return self._views[()]

    def barrier(self) -> None:
        """The current stream waits until those of all ranks are here; what came before is visible to all of them."""
        self._memory[1].barrier()


@dataclass
class SignalledMemory(PeerMemory):
    """Memory whose uses all ranks begin and end, with signals between them.

    `uses` counts the uses that this rank has begun. It is also the value of the signals of the current use.
    """

    uses: int = field(default=0, init=False)
    busy: bool = field(default=False, init=False)
    _header: ClassVar[int] = HEADER

    def __post_init__(self) -> None:
        self._own, self._size = self.group.rank(), self.group.size()
        self._others = [(self._own + step) % self._size for step in range(1, self._size)]

    def reserve(self, num_bytes: int) -> None:
        """Make room; the uses begin anew if the memory must grow."""
        before = self.capacity
        super().reserve(num_bytes)
        if self.capacity != before:
            self.uses = 0

    def begin(self, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Begin a use with `num_bytes` of data per rank: the stream waits until all ranks have finished the last one.

        Collective. It makes the CPU wait only if the memory must grow.
        """
        assert not self.busy, "the memory has one use at a time"
        self.busy = True
        self.reserve(num_bytes)
        if self.uses:
            for rank in self._others:
                await_word(stream, self._word(self._own, FINISHED, rank), self.uses)
        self.uses += 1

    def end(self, stream: torch.cuda.Stream) -> None:
        """End the use when the preceding work of the stream is done; its tensors are invalid from then on."""
        for rank in self._others:
            raise_word(stream, self._word(rank, FINISHED, self._own), self.uses)
        self.busy = False

    def tell(self, stream: torch.cuda.Stream, rank: int, channel: int) -> None:
        """Tell a rank, on a channel, that the preceding work of the stream is done; once per use and channel."""
        raise_word(stream, self._word(rank, FIRST + channel, self._own), self.uses)

    def hear(self, stream: torch.cuda.Stream, rank: int, channel: int) -> None:
        """The stream waits for what `rank` tells on a channel."""
        await_word(stream, self._word(self._own, FIRST + channel, rank), self.uses)

    def _word(self, rank: int, channel: int, of: int) -> int:
        """The address of a word of rank `rank`, written by rank `of`."""
        offset = 4 * (channel * self._size + of)
        assert offset < HEADER
        return self._addresses[rank] + offset


def size_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor in such memory, rounded up."""
    return aligned(prod(shape) * dtype.itemsize)
