"""Reading once (`parallel.read_once`): one rank reads the samples that several ranks compute with, and sends them on.

The ranks that differ only along axes that do not divide the batch (tensor, context and pipeline parallelism) share
their samples. The first of them reads and decodes; the others have a `SharedLoader` without files. A step's micro
batches travel in threads: on every rank one thread runs the broadcasts of a `take` in their order, in a group that
nothing else uses, and puts what arrives into a queue without a limit. So no broadcast waits for a computation, and no
pipeline schedule can wait for itself. The cost is memory: a rank may hold all micro batches of a step on the CPU.
"""

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mplug import Loader, MicroBatch, Run, RunError

T = TypeVar("T")
ALIGNED = 16
"""Entries of a message start at multiples of this many bytes."""
MIRRORED = ("vocab_size", "samples_per_epoch", "tokenizer", "fingerprint", "imbalance")
"""The attributes of the reading rank's loader that the others have too."""
END = object()


class Sharing:
    """What the host asks: `loader` returns the loader of a rank; one rank of each group reads."""

    def loader(self, run: Run, build: Callable[[], Loader]) -> Loader:
        """The loader of this rank. Only ranks that read call `build`; its errors reach all of them. Collective."""
        axes = [axis.name for axis in run.mesh.views["dense"] if "batch" not in axis.entries]
        group = run.group_of_cpus(*axes, use="samples")
        return build() if group is None else SharedLoader(Channel(group), build)


@dataclass(frozen=True)
class Last:
    """What follows the last micro batch of a step: the facts of the loader that a step changes."""

    imbalance: float | None


class Lost(RunError):
    """A rank has ended, or the network has failed."""


class Failed(Exception):
    """The message of an exception that the reading rank could not send whole."""


class Channel:
    """Objects and micro batches from the first rank of a group to the others, in the order of the calls."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.first = group, dist.get_global_rank(group, 0)
        self.reads = group.rank() == 0

    def from_reader(self, work: Callable[[], T]) -> T:
        """What `work` returns on the reading rank; an exception of it is raised on all ranks. Collective."""
        if not self.reads:
            received: T = self.receive()
            return received
        try:
            value = work()
            message = packed(value)
        except Exception as error:
            self.send_error(error)
            raise
        self._broadcast(message)
        return value

    def send(self, value: Any) -> None:
        """Send an object, or a mapping of tensors, to the other ranks."""
        self._broadcast(packed(value))

    def send_error(self, error: Exception) -> None:
        """Send an exception, which `receive` raises."""
        try:
            data = pickle.dumps(error)
            pickle.loads(data)  # an exception whose class needs more arguments is pickled, but never read
        except Exception:
            data = pickle.dumps(Failed(f"{type(error).__name__}: {error}"))
        self._broadcast(b"E" + data)

    def receive(self) -> Any:
        """The next object; raises the exception that was sent instead."""
        length = torch.zeros(1, dtype=torch.int64)
        self._exchange(length)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._exchange(data)
        return unpacked(data)

    def _broadcast(self, data: "bytes | Tensor") -> None:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if isinstance(data, bytes) else data
        self._exchange(torch.tensor([len(tensor)]))
        self._exchange(tensor)

    def _exchange(self, tensor: Tensor) -> None:
        try:
            dist.broadcast(tensor, self.first, group=self.group)
        except RuntimeError as error:
            raise Lost(
                f"the ranks with the same samples, of which rank {self.first} reads, no longer reach each other: "
                f"{str(error).splitlines()[0]}"
            ) from error


def packed(value: Any) -> "bytes | Tensor":
    """A message: a mapping whose values are all CPU tensors as their bytes, any other object as a pickle."""
    tensors = isinstance(value, dict) and value and all(_is_plain(one) for one in value.values())
    if not tensors:
        file = io.BytesIO(b"O")
        file.seek(1)
        torch.save(value, file)
        return file.getvalue()
    header = pickle.dumps([(name, one.dtype, tuple(one.shape)) for name, one in value.items()])
    start = _aligned(1 + 8 + len(header))
    sizes = [_aligned(one.numel() * one.itemsize) for one in value.values()]
    data = torch.empty(start + sum(sizes), dtype=torch.uint8)
    data[: 9 + len(header)] = torch.frombuffer(
        bytearray(b"T" + len(header).to_bytes(8, "little") + header), dtype=torch.uint8
    )
    for one, size in zip(value.values(), sizes, strict=True):
        number = one.numel() * one.itemsize
        data[start : start + number].view(one.dtype).copy_(one.flatten())
        start += size
    return data


def unpacked(data: Tensor) -> Any:
    """The value of a message. Its tensors are views of `data`."""
    view: Any = memoryview(data.numpy())  # type: ignore[arg-type]
    kind = bytes(view[:1])
    if kind == b"E":
        raise pickle.loads(view[1:])
    if kind == b"O":
        return torch.load(io.BytesIO(view[1:]), weights_only=False)
    length = int.from_bytes(view[1:9], "little")
    start, found = _aligned(9 + length), dict[str, Tensor]()
    for name, dtype, shape in pickle.loads(view[9 : 9 + length]):
        number = torch.Size(shape).numel() * dtype.itemsize
        found[name] = data[start : start + number].view(dtype).view(shape)
        start += _aligned(number)
    return found


def _is_plain(value: object) -> bool:
    return type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided


def _aligned(number: int) -> int:
    return -(-number // ALIGNED) * ALIGNED


class SharedLoader(Loader):
    """A loader whose samples one rank reads.

    All ranks call its methods in the same order, as the contract of loaders says.

    State, position and failures are those of the reading rank, on every rank: so a run resumes with or without it.
    """

    imbalance: float | None = None

    def __init__(self, channel: Channel, build: Callable[[], Loader]) -> None:
        self._channel = channel
        self._loader: Loader | None = None
        self._thread: Thread | None = None
        self._stopping = Event()
        self._copy(channel.from_reader(lambda: self._built(build)))

    def _built(self, build: Callable[[], Loader]) -> dict[str, Any]:
        self._loader = build()
        return {**self._facts(), "merges": self._loader.merge_states is not None}

    def _facts(self) -> dict[str, Any]:
        return {name: getattr(self._loader, name, None) for name in MIRRORED}

    def _copy(self, facts: dict[str, Any]) -> None:
        for name in MIRRORED:
            setattr(self, name, facts[name])
        if facts["merges"]:
            self.merge_states = self._merged

    def _merged(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Only rank 0 merges, and rank 0 reads."""
        assert self._loader is not None
        assert self._loader.merge_states is not None
        return self._loader.merge_states(states)

    def state_dict(self) -> dict[str, Any]:
        """The state of the reading rank. Collective."""
        self._settle()
        return self._channel.from_reader(lambda: self._loader.state_dict())  # type: ignore[union-attr]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a state, on the rank that reads; its refusal is raised on all ranks. Collective."""
        self._settle()
        self._channel.from_reader(lambda: self._loader.load_state_dict(state))  # type: ignore[union-attr]

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """The micro batches of the reading rank, which reads them from now on, ahead of the step. Collective."""
        self._settle()
        arriving: SimpleQueue[Any] = SimpleQueue()
        batches = self._loader.take(num_samples) if self._loader is not None else None  # its state moves now
        self._stopping = Event()
        work = self._send if batches is not None else self._receive
        self._thread = Thread(target=work, args=(arriving, batches), name="samples", daemon=True)
        self._thread.start()
        return self._arrived(arriving, self._stopping, self._thread)

    @staticmethod
    def _arrived(arriving: "SimpleQueue[Any]", stopping: Event, thread: Thread) -> Iterator[MicroBatch]:
        """What arrives. All ranks take the same number; one that stops early waits until nothing is under way."""
        try:
            while (found := arriving.get()) is not END:
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            stopping.set()
            thread.join()

    def _send(self, arriving: "SimpleQueue[Any]", batches: Iterator[MicroBatch]) -> None:
        """Read micro batches and send them; then the facts that a step changes."""
        try:
            for batch in batches:
                self._channel.send(batch)
                arriving.put(batch)
                if self._stopping.is_set():
                    break
        except Exception as error:
            arriving.put(error)
            if not isinstance(error, Lost):
                self._channel.send_error(error)
            return
        self.imbalance = getattr(self._loader, "imbalance", None)
        self._channel.send(Last(self.imbalance))
        arriving.put(END)

    def _receive(self, arriving: "SimpleQueue[Any]", _: None) -> None:
        try:
            while not isinstance(found := self._channel.receive(), Last):
                arriving.put(found)
        except Exception as error:
            arriving.put(error)
            return
        self.imbalance = found.imbalance
        arriving.put(END)

    def _settle(self) -> None:
        """Wait until nothing of the last `take` is under way; the reading rank then reads no further micro batch."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
