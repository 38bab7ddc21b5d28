"""The state of a run in the memory of its ranks, and how any rank gets its boxes from the ranks that hold them.

It is a checkpoint without files, by the same algebra: each rank offers the boxes that it would write, all ranks receive
the index of the boxes, and each rank asks for the overlaps of the boxes that it would read. The requests and the boxes
are messages between two ranks. A rank sends and receives at most `limit` bytes at a time.
"""

import copy
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mplug.errors import RunError
from mplug.run.run import Run
from mplug_saving.boxes import Boxed, State, owned_boxes, plan_of
from mplug_saving.index import Index, Overlap
from mplug_saving.names import file_of
from mplug_saving.plans import KeptPlans
from mplug_saving.position import Position
from mplug_saving.rank_exchanges import at_first, from_rank, raise_alike

LIMIT = 1 << 26
"""Bytes that a rank sends, and receives, at a time."""
Offsets = tuple[int, ...]
Asked = tuple[str, Overlap]
"""The name of a tensor, and an overlap of a box that one rank holds with a box that another one wants."""


@dataclass(frozen=True)
class LiveState:
    """A run's state: on each rank the tensors that it would write to a checkpoint, and where those of all ranks are.

    `dtypes` are those of the tensors, and `plain` is the plain data of a checkpoint, on every rank. `holders` are the
    ranks that hold the parts of each file of the index; a checkpoint has a file per rank.
    """

    own: State
    index: Index
    dtypes: Mapping[str, torch.dtype]
    plain: dict[str, Any]
    holders: Mapping[str, int]


def capture(run: Run, position: Position, known: LiveState | None = None) -> LiveState:
    """The state of a run between two steps. Collective.

    Tensors in the memory of the CPU are not copied, so the run must not train on with them. Those on a GPU are copied
    to the CPU's memory, so that the GPU can free them. Raises RunError if the ranks do not hold every element once.

    With `known`, a state of the same parts, its index is used, and tensors stay where they are.
    """
    state = position.state(owned_boxes)
    if known is not None:
        return replace(known, own=_detached(state), plain=_plain(run, position))
    own = {name: _on_cpu(boxed) for name, boxed in state.items()}
    size = run.mesh.world_size
    index, dtypes = index_of(run, size, at_first(run, plan_of(own)))
    ranks = {file_of(rank): rank for rank in range(size)}
    return LiveState(own, index, dtypes, _plain(run, position), ranks)


def index_of(run: Run, size: int, plans: Sequence[bytes]) -> tuple[Index, dict[str, torch.dtype]]:
    """(the index, the dtypes of the tensors) of a state in `size` parts, of whose plans rank 0 has all. Collective.

    Raises RunError on all ranks if the parts do not hold every element once.
    """
    error, tensors = None, dict[str, Any]()
    if run.rank == 0:
        kept = KeptPlans()
        try:
            kept.receive(plans)
            tensors = json.loads(kept.table().text)
        except ValueError as fault:
            error = RunError(f"the ranks do not hold the state of the run completely: {fault}")
    raise_alike(run, error)
    files: Any = dict.fromkeys(map(file_of, range(size)))  # a name stands for the rank, or the part, of this number
    index = Index.of({"files": files, "tensors": tensors}) if run.rank == 0 else None
    dtypes = {name: getattr(torch, saved["dtype"]) for name, saved in tensors.items()}
    found = from_rank(run, 0, (index, dtypes) if run.rank == 0 else None)
    assert found is not None
    assert found[0] is not None
    return found[0], found[1]


def _plain(run: Run, position: Position) -> dict[str, Any]:
    """The plain data of a checkpoint, on every rank: a copy."""
    plain = position.plain()
    found = from_rank(run, 0, copy.deepcopy(plain) if run.rank == 0 else None)
    assert found is not None
    return found


def _detached(state: State) -> State:
    return {
        name: Boxed(boxed.shape, {start: part.detach() for start, part in boxed.parts.items()})
        for name, boxed in state.items()
    }


def _on_cpu(boxed: Boxed) -> Boxed:
    return Boxed(boxed.shape, {start: part.detach().to("cpu") for start, part in boxed.parts.items()})


def fill(run: Run, live: LiveState, wanted: State, limit: int = LIMIT) -> int:
    """Fill the parts of `wanted` from the ranks that hold them; the bytes that this rank received. Collective.

    `wanted` may be of another layout than `live`, of the same ranks.
    """
    asked = _asked_of(live, wanted)
    own = asked.pop(run.rank, [])
    for name, overlap in own:
        _copy(live, wanted, name, overlap)
    if run.groups is None:
        return 0
    others = _exchanged_requests(run, asked)
    peers = int(run.largest(torch.tensor(float(max(len(asked), len(others))), device=run.device)))
    quota = max(limit // max(peers, 1), 1)
    incoming = {rank: list(_rounds(live, requests, quota)) for rank, requests in asked.items()}
    outgoing = {rank: list(_rounds(live, requests, quota)) for rank, requests in others.items()}
    count = max(map(len, (*incoming.values(), *outgoing.values())), default=0)
    received = 0
    for number in range(int(run.largest(torch.tensor(float(count), device=run.device)))):
        sent = {rank: rounds[number] for rank, rounds in outgoing.items() if number < len(rounds)}
        taken = {rank: rounds[number] for rank, rounds in incoming.items() if number < len(rounds)}
        received += _exchange(run, live, wanted, sent, taken)
    return received


def _asked_of(live: LiveState, wanted: State) -> dict[int, list[Asked]]:
    """What this rank asks for, by the rank that holds it."""
    asked: dict[int, list[Asked]] = {}
    for name, boxed in wanted.items():
        boxes = [(start, tuple(part.shape)) for start, part in boxed.parts.items()]
        for overlap in live.index.overlaps(name, boxes):
            asked.setdefault(live.holders[overlap.file], []).append((name, overlap))
    return asked


def _exchanged_requests(run: Run, asked: Mapping[int, Sequence[Asked]]) -> dict[int, list[Asked]]:
    """What other ranks ask of this one, by rank: first the sizes of all messages, then the messages."""
    assert run.groups is not None
    group, size = run.groups.beside(), run.mesh.world_size
    texts = {rank: _text(one) for rank, one in asked.items()}
    sizes = torch.tensor([len(texts[rank]) if rank in texts else 0 for rank in range(size)])
    theirs = torch.empty_like(sizes)
    dist.all_to_all_single(theirs, sizes, group=group)
    boxes = {rank: torch.empty(count, dtype=torch.uint8) for rank, count in enumerate(theirs.tolist()) if count}
    _transfer(texts, boxes, group)
    return {rank: pickle.loads(box.numpy().tobytes()) for rank, box in boxes.items()}


def _text(asked: Sequence[Asked]) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps([*asked])), dtype=torch.uint8)


def _transfer(sent: Mapping[int, Tensor], taken: Mapping[int, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Send a message to each rank of `sent`, and fill the message of each rank of `taken`."""
    operations = [dist.P2POp(dist.irecv, message, rank, group) for rank, message in sorted(taken.items())]
    operations += [dist.P2POp(dist.isend, message, rank, group) for rank, message in sorted(sent.items())]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _rounds(live: LiveState, asked: Iterable[Asked], quota: int) -> Iterator[list[Asked]]:
    """The overlaps in portions of at most `quota` bytes, or of one element; larger overlaps are divided."""
    portion, size = list[Asked](), 0
    for name, overlap in asked:
        itemsize = live.dtypes[name].itemsize
        for part in _divided(overlap, max(quota // itemsize, 1)):
            num_bytes = prod(part.shape) * itemsize
            if portion and size + num_bytes > quota:
                yield portion
                portion, size = [], 0
            portion.append((name, part))
            size += num_bytes
    if portion:
        yield portion


def _divided(overlap: Overlap, most: int) -> Iterator[Overlap]:
    """An overlap in consecutive parts of at most `most` elements."""
    shape = overlap.shape
    if prod(shape) <= most:
        yield overlap
        return
    dim = next(number for number, length in enumerate(shape) if length > 1)
    rows = max(most // prod(shape[dim + 1 :]), 1)
    for first in range(0, shape[dim], rows):
        part = Overlap(
            overlap.file,
            overlap.chunk,
            overlap.wanted,
            _moved(overlap.stored, dim, first),
            _moved(overlap.placed, dim, first),
            (*shape[:dim], min(rows, shape[dim] - first), *shape[dim + 1 :]),
        )
        yield from _divided(part, most)


def _moved(offsets: Offsets, dim: int, by: int) -> Offsets:
    return (*offsets[:dim], offsets[dim] + by, *offsets[dim + 1 :])


def _exchange(
    run: Run,
    live: LiveState,
    wanted: State,
    sent: Mapping[int, Sequence[Asked]],
    taken: Mapping[int, Sequence[Asked]],
) -> int:
    """One portion from and to every rank; the bytes received."""
    messages = {rank: _message(live, asked).to(run.device) for rank, asked in sent.items()}
    boxes = {
        rank: torch.empty(sum(_num_bytes(live, *one) for one in asked), dtype=torch.uint8, device=run.device)
        for rank, asked in taken.items()
    }
    _transfer(messages, boxes)
    for rank, asked in taken.items():
        parts = boxes[rank].split([_num_bytes(live, *one) for one in asked])
        for (name, overlap), part in zip(asked, parts, strict=True):
            values = part.clone().view(live.dtypes[name]).view(overlap.shape)  # a copy has the alignment of its dtype
            _place(wanted, name, overlap, values)
    return sum(box.numel() for box in boxes.values())


def _num_bytes(live: LiveState, name: str, overlap: Overlap) -> int:
    return prod(overlap.shape) * live.dtypes[name].itemsize


def _message(live: LiveState, asked: Iterable[Asked]) -> Tensor:
    parts = (_held(live, name, overlap).reshape(-1).contiguous().view(torch.uint8) for name, overlap in asked)
    return torch.cat([*parts])


def _copy(live: LiveState, wanted: State, name: str, overlap: Overlap) -> None:
    _place(wanted, name, overlap, _held(live, name, overlap))


def _held(live: LiveState, name: str, overlap: Overlap) -> Tensor:
    """The elements of an overlap that this rank holds."""
    return _inside(live.own[name].parts[overlap.chunk], overlap.stored, overlap.shape)


def _place(wanted: State, name: str, overlap: Overlap, values: Tensor) -> None:
    """Write the elements of an overlap into the part that wants them."""
    with torch.no_grad():
        _inside(wanted[name].parts[overlap.wanted], overlap.placed, overlap.shape).copy_(values)


def _inside(part: Tensor, offsets: Offsets, shape: Sequence[int]) -> Tensor:
    return part[tuple(slice(offset, offset + length) for offset, length in zip(offsets, shape, strict=True))]
