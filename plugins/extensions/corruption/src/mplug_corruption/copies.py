"""Which parts of which tensors ranks must hold equal, and a comparison of them in one small sum over all ranks.

Each rank computes a checksum of every part (the sum of its elements' bits, as integers). The coefficients of a part's
copies add up to 0, so the sum over the ranks of coefficient times checksum is 0 if all copies are equal. If one copy
differs, it is not 0. All parts share `SLOTS` such sums, so the exchange has the same size for every model and layout,
and needs no process groups. Only if a sum is not 0 do ranks exchange the checksums themselves.

A checksum finds every single flipped bit. Changes that cancel each other in the sum are not found.
"""

import socket
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mplug import Box, Model, Optimizer, Piece, Placement, Run, ShapedState, counted, listed, region

SLOTS = 64
"""Number of sums that ranks exchange."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers with the size of an element in bytes."""


@dataclass(frozen=True)
class Part:
    """A part of a tensor of this rank that other ranks hold too: `values`, and the ranks with a copy, ascending."""

    kind: str
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    values: Tensor

    @property
    def key(self) -> str:
        """The name of the part, the same on all of its ranks."""
        return f"{self.kind} '{self.name}' {list(self.start)} {list(self.shape)}"


class Copies:
    """The parts of this rank's tensors that other ranks hold too. Their values are read between two steps."""

    def __init__(self, run: Run, model: Model, pieces: Iterable[Piece], optimizer: Optimizer) -> None:
        self.run, self.model = run, model
        self._pieces, self._optimizer = list(pieces), optimizer

    @cached_property
    def parts(self) -> list[Part]:
        """All of them, after the first step: an optimizer may make its states then."""
        weights = self.model.parameters() if self.model.engine is None else {}
        found = [
            part
            for name, weight in weights.items()
            if self.model.placements[name].gathered_along is None
            for part in self._of("weight", name, weight.detach(), self.model.placements[name])
        ]
        held = {(part.values.data_ptr(), part.values.shape) for part in found}
        for piece in self._pieces:
            for kind, values in self._states(piece):
                of_piece = self._of(kind, piece.name, values, piece.placement)
                found += [part for part in of_piece if (part.values.data_ptr(), part.values.shape) not in held]
        return found

    def _states(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        yield "master weight", piece.master
        for name, state in self._optimizer.state(piece).items():
            if not isinstance(state, ShapedState) and state.shape == piece.master.shape:
                yield f"optimizer state '{name}' of", state

    def _of(self, kind: str, name: str, values: Tensor, placement: Placement) -> Iterator[Part]:
        for box in placement.boxes(self.run.rank):
            if len(box.copies) > 1:
                yield Part(kind, name, *_where(box), tuple(box.copies), region(values, box))

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """(slot of each part, coefficient of this rank's copy)."""
        slots = [zlib.crc32(part.key.encode()) % SLOTS for part in self.parts]
        factors = [coefficients(len(part.ranks))[part.ranks.index(self.run.rank)] for part in self.parts]
        both = torch.tensor([slots, factors], dtype=torch.int64)
        slots_, factors_ = both.to(self.run.device).unbind()
        return slots_, factors_

    def compare(self) -> "Comparison":
        """Launch a comparison. Collective; on a GPU, the CPU does not wait."""
        self.model.weights_settled()
        sums = torch.zeros(SLOTS, dtype=torch.int64, device=self.run.device)
        checksums = torch.zeros(0, dtype=torch.int64, device=self.run.device)
        if self.parts:
            slots, factors = self._factors
            checksums = torch.stack([checksum(part.values).to(self.run.device) for part in self.parts])
            sums.index_add_(0, slots, checksums * factors)
        return Comparison(self.run, self.parts, checksums, self.run.summed(sums))


class Comparison:
    """A launched comparison."""

    def __init__(self, run: Run, parts: list[Part], checksums: Tensor, sums: Tensor) -> None:
        self._run, self._parts, self._checksums = run, parts, checksums
        self._sums, self._copied = sums, None
        if sums.is_cuda:
            self._sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            self._sums.copy_(sums, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def differences(self) -> list[str]:
        """A sentence for each part whose copies differ; all ranks get the same. Waits for the comparison only."""
        if self._copied is not None:
            self._copied.synchronize()
        if not bool(self._sums.any()):
            return []
        own = zip(self._parts, self._checksums.tolist(), strict=True)
        found = self._run.gathered((socket.gethostname(), {part.key: (value, part.ranks) for part, value in own}))
        return differences([host for host, _ in found], [checksums for _, checksums in found])


def differences(hosts: list[str], found: list[Mapping[str, tuple[int, tuple[int, ...]]]]) -> list[str]:
    """One sentence per part whose copies differ. `found` has (checksum, ranks with a copy) by part, of each rank."""
    sentences = []
    for key, (_, ranks) in {key: one for of_rank in found for key, one in of_rank.items()}.items():
        values = {rank: found[rank][key][0] for rank in ranks}
        if len(set(values.values())) > 1:
            sentences.append(_sentence(key, values, hosts))
    return sentences


def _sentence(key: str, values: Mapping[int, int], hosts: list[str]) -> str:
    """Name the ranks outside of the majority, if there is one."""
    named = key[: key.index("[")].strip()
    (usual, number), *_ = Counter(values.values()).most_common()
    places = {rank: f"rank {rank} on {hosts[rank]}" for rank in values}
    if 2 * number > len(values):
        odd = [places[rank] for rank, value in values.items() if value != usual]
        verb = "holds" if len(odd) == 1 else "hold"
        return f"{listed(odd)} {verb} other bits of the {named} than the {counted(number, 'rank')} with an equal copy"
    return f"{listed(places.values())} hold different bits of the {named}, and no majority shows which one is wrong"


def coefficients(number: int) -> list[int]:
    """Integers for the copies of a part that add up to 0; none of them is 0."""
    tail = [1, 1, -2] if number % 2 else []
    return [1, -1] * ((number - len(tail)) // 2) + tail


def checksum(values: Tensor) -> Tensor:
    """The sum [] of the bits of all elements, read as integers of their size, modulo 2^64; one pass over memory."""
    return values.view(INTEGERS[values.element_size()]).sum(dtype=torch.int64)


def _where(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(box.start), tuple(box.shape)
