"""Optimizer states in the memory of the CPU, a chunk of the model on the device at a time (`optimizer.offload`).

A chunk has an optimizer of its own, so any plugin's will do. Its states leave the device by their storages: every
tensor that shares one keeps pointing to it, and has memory again when the chunk returns.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mplug.contracts.optimizer import Piece, ShapedState, StepScalars, tensors_of
from mplug.errors import UsageError
from mplug_updates.optimizer_parts import GroupedOptimizer, Part

if TYPE_CHECKING:
    from mplug.layout.placement import Placement
    from mplug.model.model import Model
    from mplug.run.run import Run

FIELD = "optimizer.offload"
AROUND = 3
"""Chunks that are on the device at the same time: one leaves, one is updated, one arrives."""


def refuse_offload(run: "Run", model: "Model") -> None:
    """Raise UsageError if the config offloads states that are not on the device, or a graph replays the update."""
    if run.config.offload is None:
        return
    if model.engine is not None:
        (label,) = run.hooks.implementers("shard_states")
        raise UsageError(f"{FIELD}: the engine of {label} keeps the optimizer states itself; use its own setting")
    if any(placement.offloaded for placement in model.placements.values()):
        raise UsageError(f"{FIELD}: master weights and optimizer states are in CPU memory already; remove the field")
    if run.config.trainer.graphs:
        raise UsageError(
            f"{FIELD} gives states other memory in every step, which a graph cannot replay; set trainer.graphs=false"
        )


def chunks_of(placements: "Mapping[str, Placement]", size: int) -> dict[str, int]:
    """The number of the chunk of each parameter: neighbours of about `size` elements, whatever the layout is."""
    sizes = [placement.numel for placement in placements.values()]
    middles = (end - own // 2 for own, end in zip(sizes, accumulate(sizes), strict=True))
    return {name: middle // size for name, middle in zip(placements, middles, strict=True)}


class Away(NamedTuple):
    """A storage of states, and the bytes [N] that hold its values while it has no memory."""

    storage: torch.UntypedStorage
    device: torch.device
    host: Tensor

    def bytes_of(self) -> Tensor:
        """The values of the storage as bytes [N]."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage, 0, (len(self.host),), (1,))


class Chunk:
    """The states of an optimizer: on the device while it updates, and otherwise in the memory of the CPU.

    States of a build without memory stay where they are.
    """

    def __init__(self, part: Part) -> None:
        self.part = part
        self._arrived: torch.cuda.Event | None = None
        self._left: torch.cuda.Event | None = None
        states = {piece.name: part.optimizer.state(piece) for piece in part.pieces}
        tensors = [one for state in states.values() for one in tensors_of(state).values()]
        storages = {one.untyped_storage()._cdata: (one.untyped_storage(), one.device) for one in tensors}
        self.num_bytes = sum(storage.nbytes() for storage, _ in storages.values())
        self.is_real = not any(isinstance(one, FakeTensor) for one in tensors)
        self._states: Mapping[str, Mapping[str, Tensor | ShapedState]] = states
        self._away: list[Away] = []
        if self.is_real and tensors:
            self._move(storages, states)

    def _move(
        self,
        storages: Mapping[int, tuple[torch.UntypedStorage, torch.device]],
        states: Mapping[str, Mapping[str, Tensor | ShapedState]],
    ) -> None:
        """Make memory on the CPU, let the states out, and keep tensors of the CPU that have the same values."""
        starts = [0, *accumulate(-(-storage.nbytes() // ALIGNED) * ALIGNED for storage, _ in storages.values())]
        host = self._host = _locked(starts[-1], next(iter(storages.values()))[1])
        at = dict(zip(storages, starts, strict=False))
        for key, (storage, device) in storages.items():
            self._away.append(Away(storage, device, host[at[key] : at[key] + storage.nbytes()]))
        whole = host.untyped_storage()

        def in_host(tensor: Tensor) -> Tensor:
            first = at[tensor.untyped_storage()._cdata] // tensor.itemsize + tensor.storage_offset()
            return torch.empty(0, dtype=tensor.dtype).set_(whole, first, tensor.shape, tensor.stride())

        def state_in_host(state: Tensor | ShapedState) -> Tensor | ShapedState:
            if isinstance(state, ShapedState):
                parts = {start: in_host(part) for start, part in state.parts.items()}
                return ShapedState(state.shape, parts, state.writes)
            return in_host(state)

        self._states = {name: {key: state_in_host(one) for key, one in state.items()} for name, state in states.items()}
        self.leave()
        self.free()

    def arrive(self, stream: "torch.cuda.Stream | None") -> None:
        """Give the states memory on the device, and start the copy of their values."""
        if not self._away:
            return
        for away in self._away:
            away.storage.resize_(len(away.host))
        if stream is None:
            for away in self._away:
                away.bytes_of().copy_(away.host)
            return
        stream.wait_stream(torch.cuda.current_stream())  # which may have used the memory before
        if self._left is not None:
            stream.wait_event(self._left)
        with torch.cuda.stream(stream):
            for away in self._away:
                away.bytes_of().copy_(away.host, non_blocking=True)
            self._arrived = stream.record_event()

    def update(self, scalars: StepScalars) -> None:
        """Update the pieces once the states are there."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        if self._away:
            self.part.optimizer.states_moved()
        self.part.step(scalars)

    def leave(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Start the copy of the states to the CPU, after what the current stream computes."""
        if stream is None:
            for away in self._away:
                away.host.copy_(away.bytes_of())
        elif self._away:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for away in self._away:
                    away.host.copy_(away.bytes_of(), non_blocking=True)
                self._left = stream.record_event()

    def free(self) -> None:
        """Give the memory on the device back, which the current stream uses only after the states have left."""
        if self._left is not None:
            torch.cuda.current_stream().wait_event(self._left)
        for away in self._away:
            away.storage.resize_(0)

    def free_later(self, stream: "torch.cuda.Stream | None") -> None:
        """Give the memory back without letting the current stream wait: it is used again once the states have left."""
        for away in self._away:
            if stream is not None:
                away.bytes_of().record_stream(stream)
            away.storage.resize_(0)

    def state(self, piece: Piece) -> Mapping[str, Tensor | ShapedState]:
        """The state of a piece in the memory of the CPU; the CPU waits for it."""
        if self._left is not None:
            self._left.synchronize()
        return self._states[piece.name]


ALIGNED = 64
"""Every storage begins at a multiple of so many bytes."""


def _locked(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes in the memory of the CPU, which a GPU can copy to and from while it computes.

    Torch's own allocator of such memory rounds sizes up to powers of two.
    """
    host = torch.empty(num_bytes, dtype=torch.uint8)
    if device.type == "cuda" and num_bytes:
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(host.data_ptr(), num_bytes, 0)
        if int(error) != 0:
            raise UsageError(
                f"{FIELD}: the system does not lock {num_bytes >> 20} MiB of memory for the GPU (cudaHostRegister "
                f"returns {int(error)}); raise the limit of locked memory (ulimit -l), or remove the field"
            )
        finalize(host, runtime.cudaHostUnregister, host.data_ptr())
    return host


class OffloadedOptimizer(GroupedOptimizer):
    """Updates chunk after chunk: the next one arrives, and the one before leaves, while one is updated."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__([chunk.part for chunk in chunks])
        self._chunks = chunks
        self._chunk_of = {piece.name: chunk for chunk in chunks for piece in chunk.part.pieces}
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        inward, outward = self._copying(scalars.lr.device)
        self._chunks[0].arrive(inward)
        for number, chunk in enumerate(self._chunks):
            for before in self._chunks[max(0, number - 2) : max(0, number - 1)]:
                before.free()
            for following in self._chunks[number + 1 : number + 2]:
                following.arrive(inward)
            chunk.update(scalars)
            chunk.leave(outward)
        for chunk in self._chunks[-2:]:
            chunk.free_later(outward)

    def _copying(self, device: torch.device) -> "tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]":
        if device.type != "cuda":
            return None, None
        self._streams = self._streams or (torch.cuda.Stream(), torch.cuda.Stream())
        return self._streams

    def state(self, piece: Piece) -> Mapping[str, Tensor | ShapedState]:
        """The state of a piece, in the memory of the CPU."""
        return self._chunk_of[piece.name].state(piece)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of all states in the memory of the CPU, and the most that are on the device at a time."""
        sizes = [chunk.num_bytes for chunk in self._chunks]
        return sum(sizes), max((sum(sizes[n : n + AROUND]) for n in range(len(sizes))), default=0)
