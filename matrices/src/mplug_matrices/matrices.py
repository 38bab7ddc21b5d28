"""Whole matrices of pieces: brought to their owners, updated there in batches of equal shapes, and sent back.

Each matrix has one owner among the ranks that hold a part of it. The ranks of a `Family` exchange parts in rounds of
bounded memory: the parts of the next round travel while the owners compute, and so do the results of the last one. All
orders follow from the placements, so a run repeats to the bit. O rows, I columns, N matrices of one shape.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mplug.gradients.region import region
from mplug.layout.placement import Box
from mplug_matrices.blocks import Block, Held, Shared
from mplug_ops import Exchange, Item

BATCH = 1 << 25
"""Maximum elements of an owner's matrices in a round: small ones need batches to fill a GPU, large ones cost memory."""

Function = Callable[[Sequence[Block], Tensor], Tensor]
"""(matrices of one shape, their values [N, O, I]) -> values [N, O, I]; it may overwrite what it receives."""
Tensors = Mapping[str, Tensor]
"""A tensor of the shape of its piece for each piece, by the name of the parameter."""


class Arrived(NamedTuple):
    """Results of matrices with one shape (O, I), as far as this rank holds them.

    `targets` are views of the tensors to change, `values` new tensors of the same shapes and dtype.
    """

    shape: tuple[int, ...]
    targets: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True)
class Family:
    """Matrices that the same ranks share: `owners` has the rank that owns each."""

    rank: int
    ranks: Sequence[int]
    group: dist.ProcessGroup | None
    shared: Sequence[Shared]
    owners: Sequence[int]

    @cached_property
    def owned(self) -> list[Shared]:
        """The matrices that this rank owns, in order."""
        return [one for one, owner in zip(self.shared, self.owners, strict=True) if owner == self.rank]

    @cached_property
    def rounds(self) -> "list[Round]":
        """What is exchanged, round by round: in each, the owners have some of their matrices."""
        chunks: list[list[tuple[int, Shared]]] = []
        for owner in self.ranks:
            own = [one for one, of in zip(self.shared, self.owners, strict=True) if of == owner]
            own.sort(key=lambda one: one.block.matrix_shape)  # stable: equal shapes side by side
            for number, chunk in enumerate(_chunks(own, BATCH)):
                if number == len(chunks):
                    chunks.append([])
                chunks[number] += [(owner, one) for one in chunk]
        return [Round(self, chunk) for chunk in chunks]


def _chunks(shared: Iterable[Shared], limit: int) -> Iterator[list[Shared]]:
    """Consecutive matrices with at most `limit` elements; a larger one is alone."""
    held: list[Shared] = []
    count = 0
    for one in shared:
        if held and count + one.block.numel > limit:
            yield held
            held, count = [], 0
        held.append(one)
        count += one.block.numel
    if held:
        yield held


class Round:
    """The matrices of a round, and what this rank sends and receives: parts to owners, and results from owners."""

    def __init__(self, family: Family, chunk: Sequence[tuple[int, Shared]]) -> None:
        self.group, rank = family.group, family.rank
        own = [one for owner, one in chunk if owner == rank]
        self.blocks = [one.block for one in own]
        self.sent: list[tuple[str, Box]] = []
        self.results: list[tuple[Block, Box]] = []
        sent, results = dict.fromkeys(family.ranks, 0), dict.fromkeys(family.ranks, 0)
        for owner, one in chunk:
            for held in one.sources(owner).get(rank, ()):
                self.sent.append((one.block.name, held.box))
                sent[owner] += held.numel
            for held in one.held.get(rank, ()):
                self.results.append((one.block, held.box))
                results[owner] += held.numel
        self.arriving: list[tuple[int, Held]] = []
        self.returned: list[tuple[int, Held]] = []
        arriving, returned = dict.fromkeys(family.ranks, 0), dict.fromkeys(family.ranks, 0)
        sources = [one.sources(rank) for one in own]
        for other in family.ranks:
            for number, one in enumerate(own):
                for held in sources[number].get(other, ()):
                    self.arriving.append((number, held))
                    arriving[other] += held.numel
                for held in one.held.get(other, ()):
                    self.returned.append((number, held))
                    returned[other] += held.numel
        self.num_sent, self.num_arriving = [*sent.values()], [*arriving.values()]
        self.num_returned, self.num_results = [*returned.values()], [*results.values()]
        items = [Item(one.block.name, one.block.shape, one.block.start) for _, one in chunk]
        self.exchange = Exchange("parts of matrices", family.group, items)

    # Parts to owners.

    def begin(self, tensors: Tensors, dtype: torch.dtype, device: torch.device) -> "Transfer":
        """Start to send this rank's parts to the owners."""
        self.exchange.check()
        sent = _flat([region(tensors[name], box) for name, box in self.sent], sum(self.num_sent), dtype, device)
        return Transfer(sent, self.num_sent, self.num_arriving, self.group)

    def compute(self, arrived: Tensor, function: Function) -> "Transfer":
        """Apply the function to this rank's matrices, and start to send the results back."""
        inputs: list[Tensor] = [arrived] * len(self.blocks)  # each is replaced
        by_shape = defaultdict[tuple[int, ...], list[int]](list)
        for number, block in enumerate(self.blocks):
            by_shape[block.matrix_shape].append(number)
        batches = []
        for shape, numbers in by_shape.items():
            batches.append(arrived.new_empty(len(numbers), *shape))
            for number, matrix in zip(numbers, batches[-1].unbind(), strict=True):
                inputs[number] = matrix
        parts = arrived.split([held.numel for _, held in self.arriving])
        _copy(
            [inputs[number].view(self.blocks[number].shape)[held.where] for number, held in self.arriving],
            [part.view(held.shape) for part, (_, held) in zip(parts, self.arriving, strict=True)],
        )
        outputs = inputs
        for numbers, batch in zip(by_shape.values(), batches, strict=True):
            results = function([self.blocks[number] for number in numbers], batch)
            for number, result in zip(numbers, results.unbind(), strict=True):
                outputs[number] = result
        views = [outputs[number].view(self.blocks[number].shape)[held.where] for number, held in self.returned]
        returned = _flat(views, sum(self.num_returned), arrived.dtype, arrived.device)
        return Transfer(returned, self.num_returned, self.num_results, self.group)

    def arrived(self, flat: Tensor, onto: Tensors) -> Iterator[Arrived]:
        """The results that this rank holds."""
        if not self.results:
            return
        like = onto[self.results[0][0].name]
        parts = flat.to(like.device, like.dtype).split([box.numel for _, box in self.results])
        found: dict[tuple[int, ...], Arrived] = {}
        for part, (block, box) in zip(parts, self.results, strict=True):
            shape = block.matrix_shape
            _, targets, values = found.setdefault(shape, Arrived(shape, [], []))
            targets.append(region(onto[block.name], box))
            values.append(part.view(box.shape))
        yield from found.values()

    def alone(self, tensors: Tensors, onto: Tensors, function: Function, like: Tensor) -> Iterator[Arrived]:
        """The results of matrices that no other rank has a part of: nothing is sent. `like` has dtype and device."""
        by_shape = defaultdict[tuple[int, ...], list[tuple[Block, Box]]](list)
        for block, box in self.results:
            by_shape[block.matrix_shape].append((block, box))
        for shape, pairs in by_shape.items():
            batch = like.new_empty(len(pairs), *shape)
            views = [region(tensors[block.name], box).view(shape) for block, box in pairs]
            _copy([*batch.unbind()], views)
            results = function([block for block, _ in pairs], batch)
            targets = [region(onto[block.name], box).view(shape) for block, box in pairs]
            # in the memory layout of the targets: a product of a transposed matrix has another one
            values = results.to(targets[0].device, targets[0].dtype, copy=True, memory_format=torch.contiguous_format)
            yield Arrived(shape, targets, [*values.unbind()])


class Transfer:
    """An all-to-all under way: `wait` returns what arrives, flat, by the sending rank."""

    def __init__(
        self, sent: Tensor, num_sent: list[int], num_arriving: list[int], group: dist.ProcessGroup | None
    ) -> None:
        self._sent, self._arriving = sent, sent.new_empty(sum(num_arriving))
        self._work: Any = dist.all_to_all_single(
            self._arriving, sent, num_arriving, num_sent, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        """Wait (on a GPU, let the stream wait) for the transfer."""
        self._work.wait()
        return self._arriving


class Matrices:
    """The whole matrices of pieces, for an optimizer that updates each of them as a whole.

    `names` are the parameters. What is exchanged is computed at the first use, or at once if `eager`.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        names: frozenset[str],
        families: Callable[[], list[Family]],
        eager: bool = False,
    ) -> None:
        self.device, self.dtype, self.names = device, dtype, names
        self._make = families
        if eager:
            self.rounds()

    @cached_property
    def families(self) -> list[Family]:
        """The matrices by the ranks that share them, in an order that is the same on all ranks."""
        return self._make()

    @property
    def owned(self) -> list[Block]:
        """The matrices that this rank owns."""
        return [one.block for family in self.families for one in family.owned]

    def rounds(self) -> list[list[Round]]:
        """The rounds of each family."""
        return [family.rounds for family in self.families]

    def update(self, tensors: Tensors, onto: Tensors, function: Function) -> Iterator[Arrived]:
        """Apply a function to the matrices of `tensors`; yields its results beside views of `onto`, batch by batch.

        Both mappings have a tensor of its piece's shape for each piece of `names`. The function runs on the owner of a
        matrix. It receives values in `dtype`, and results travel in it too. Collective: every rank exhausts the
        iterator, and must not change `tensors` before.
        """
        like = torch.empty((), dtype=self.dtype, device=self.device)
        for family in self.families:
            if len(family.ranks) == 1:
                for one in family.rounds:
                    yield from one.alone(tensors, onto, function, like)
            else:
                yield from self._exchanged(family.rounds, tensors, onto, function)

    def _exchanged(
        self, rounds: Sequence[Round], tensors: Tensors, onto: Tensors, function: Function
    ) -> Iterator[Arrived]:
        """The rounds of one family: while owners compute one, the next and the last one travel."""
        following = rounds[0].begin(tensors, self.dtype, self.device) if rounds else None
        last: tuple[Round, Transfer] | None = None
        for number, one in enumerate(rounds):
            assert following is not None
            coming = following
            if number + 1 < len(rounds):
                following = rounds[number + 1].begin(tensors, self.dtype, self.device)
            returning = one.compute(coming.wait(), function)
            if last is not None:
                yield from last[0].arrived(last[1].wait(), onto)
            last = one, returning
        if last is not None:
            yield from last[0].arrived(last[1].wait(), onto)


def _flat(views: Sequence[Tensor], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The views, concatenated in a new flat tensor."""
    flat = torch.empty(numel, dtype=dtype, device=device)
    parts = flat.split([view.numel() for view in views])
    _copy([part.view(view.shape) for part, view in zip(parts, views, strict=True)], views)
    return flat


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_([*targets], [*sources])
