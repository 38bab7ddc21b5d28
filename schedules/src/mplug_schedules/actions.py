"""A pipeline schedule as a table of actions: each rank has a row, which lists its actions in the order of execution.

A chunk consists of consecutive units, and belongs to one rank. Chunks are numbered in the order of the model. An
activation travels from chunk c to chunk c + 1, its gradient from chunk c + 1 to chunk c. If both chunks belong to one
rank, nothing is transferred.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kinds of actions. A backward pass is one BACKWARD, or an INPUT_GRADIENT and later a WEIGHT_GRADIENT."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
"""The kinds that compute the gradient of a chunk's input."""
TRANSFERS = {
    Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1),
    Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1),
}
"""By kind of send: (the kind of the receive, the receiver's chunk minus the sender's)."""


class Action(NamedTuple):
    """One action on one micro batch in one chunk. `peer` is the rank at the other end of a send or a receive.

    Ranks are indices along the pipeline's mesh axis. A send names the chunk that computed the tensors, a receive the
    chunk that needs them.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        """'F3 of chunk 1', 'SF3 of chunk 1 to rank 2'."""
        text = f"{self.kind.value}{self.micro_batch} of chunk {self.chunk}"
        if self.peer is None:
            return text
        return f"{text} {'to' if self.kind in TRANSFERS else 'from'} rank {self.peer}"


Row = tuple[Action, ...]


@dataclass(frozen=True)
class Table:
    """The row of every rank, and the rank of every chunk."""

    rows: tuple[Row, ...]
    ranks: tuple[int, ...]

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed later than those of activations."""
        return any(action.kind is Kind.WEIGHT_GRADIENT for row in self.rows for action in row)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order of the model."""
        return tuple(chunk for chunk, owner in enumerate(self.ranks) if owner == rank)


@dataclass(frozen=True)
class Shape:
    """What a schedule is asked for. `chunks` is the number of chunks of each rank; None: the schedule's default.

    `group` is the number of consecutive micro batches that a chunk runs before the rank's next chunk; None: the
    schedule's default. `limit` is the maximum number of micro batches whose activations a rank may hold; a chunk of a
    rank with v chunks counts 1/v. A schedule that cannot follow one of these settings raises ValueError.
    """

    num_ranks: int
    num_micro_batches: int
    chunks: int | None = None
    group: int | None = None
    limit: float | None = None


def with_transfers(rows: tuple[Row, ...], ranks: tuple[int, ...]) -> Table:
    """The table of rows of computations, with the sends and receives that they need.

    This simulates all ranks at once. Each computation takes one time step, and its result is transferred at the end of
    that step. Every row lists the rank's events in this one global order, so even blocking sends cannot deadlock.
    Raises ValueError if the computations wait for each other.
    """
    done: list[dict[Action, None]] = [{} for _ in rows]  # sets in order
    complete = set[tuple[str, int, int]]()
    waiting = [deque(row) for row in rows]
    while any(waiting):
        ready = [
            rank for rank, row in enumerate(waiting) if row and all(one in complete for one in _needs(row[0], ranks))
        ]
        if not ready:
            heads = ", ".join(f"rank {rank} at {row[0]}" for rank, row in enumerate(waiting) if row)
            raise ValueError(f"the schedule deadlocks: {heads}")
        computed = [(rank, waiting[rank].popleft()) for rank in ready]
        for rank, action in computed:
            done[rank][action] = None
            complete.update((kind, action.chunk, action.micro_batch) for kind in _results(action.kind))
        for rank, action in computed:
            _hand_over(done, rank, action, ranks)
    return Table(tuple(map(tuple, done)), ranks)


def forward_half(table: Table) -> Table:
    """The forward passes of a table with their transfers: the order of an evaluation, and of sampling.

    It cannot deadlock if the table cannot: each send that it omits is omitted together with its receive.
    """
    kinds = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    rows = (tuple(action for action in row if action.kind in kinds) for row in table.rows)
    return Table(tuple(rows), table.ranks)


def _results(kind: Kind) -> str:
    """The results of a computation: F (an activation), I (a gradient of an activation)."""
    return "I" if kind in BACKWARDS else kind.value


def _needs(action: Action, ranks: tuple[int, ...]) -> list[tuple[str, int, int]]:
    """The results, of any rank, that a computation needs."""
    kind, number, chunk = action.kind, action.micro_batch, action.chunk
    if kind is Kind.FORWARD:
        return [("F", chunk - 1, number)] if chunk else []
    if kind is Kind.WEIGHT_GRADIENT:
        return [("I", chunk, number)]
    later = [("I", chunk + 1, number)] if chunk + 1 < len(ranks) else []
    return [("F", chunk, number), *later]


def _hand_over(done: list[dict[Action, None]], rank: int, action: Action, ranks: tuple[int, ...]) -> None:
    if action.kind is Kind.WEIGHT_GRADIENT:
        return
    send = Kind.SEND_FORWARD if action.kind is Kind.FORWARD else Kind.SEND_BACKWARD
    receive, further = TRANSFERS[send]
    chunk = action.chunk + further
    if 0 <= chunk < len(ranks) and ranks[chunk] != rank:
        done[rank][Action(send, action.micro_batch, action.chunk, ranks[chunk])] = None
        done[ranks[chunk]][Action(receive, action.micro_batch, chunk, rank)] = None
