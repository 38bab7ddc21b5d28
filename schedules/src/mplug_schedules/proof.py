"""A checker that proves a pipeline table for a shape, or names the faulty action."""

from collections.abc import Iterator

from mplug_schedules.actions import BACKWARDS, COMPUTE, TRANSFERS, Action, Kind, Row, Shape, Table

RECEIVES = {receive: (send, further) for send, (receive, further) in TRANSFERS.items()}


def check(table: Table, shape: Shape) -> list[float]:
    """Verify a table and return the peak number of micro batches whose activations each rank holds.

    - Every chunk belongs to one rank, and all ranks have the same number of chunks: the one of the shape, if any.
    - Every micro batch passes each chunk once forward, and once backward (in one action or in two halves).
    - Every action is in the row of its chunk's rank, and no action runs before the actions that it needs.
    - Every send has exactly one receive, at the rank that it names.
    - No rank waits forever, even if a send blocks until it is received.
    - No rank holds more activations than the shape's limit.

    Raises ValueError with the first fault.
    """
    _check_ranks(table, shape)
    for rank, row in enumerate(table.rows):
        _check_row(rank, row, table, shape.num_micro_batches)
    _check_rendezvous(table)
    peaks = [peak(table, rank) for rank in range(len(table.rows))]
    for rank, held in enumerate(peaks):
        if shape.limit is not None and held > shape.limit:
            first = _first_beyond(table, rank, shape.limit)
            raise ValueError(
                f"rank {rank} holds activations of {held:g} micro batches, more than the limit of "
                f"{shape.limit:g}: it exceeds the limit at {first}"
            )
    return peaks


def _check_ranks(table: Table, shape: Shape) -> None:
    if len(table.rows) != shape.num_ranks:
        raise ValueError(f"the table has {len(table.rows)} rows, and there are {shape.num_ranks} ranks")
    counts = [len(table.chunks_of(rank)) for rank in range(shape.num_ranks)]
    if min(counts) == 0 or len(set(counts)) > 1 or sum(counts) != len(table.ranks):
        raise ValueError(f"the ranks have {counts} of {len(table.ranks)} chunks; all must have the same number")
    if shape.chunks not in (None, counts[0]):
        raise ValueError(f"each rank has {counts[0]} chunks, and {shape.chunks} were asked for")


def _check_row(rank: int, row: Row, table: Table, num_micro_batches: int) -> None:
    done = set[Action]()
    required = set(_required(rank, row, table, num_micro_batches))
    for action in row:
        if action in done:
            raise ValueError(f"rank {rank} runs {action} twice")
        if action not in required:
            raise ValueError(f"rank {rank} must not run {action}{_why_not(rank, action, table)}")
        for need in _missing(action, rank, table, done):
            raise ValueError(f"rank {rank} runs {action} before {need}")
        done.add(action)
    for action in sorted(required - done, key=str):
        raise ValueError(f"rank {rank} lacks {action}")


def _why_not(rank: int, action: Action, table: Table) -> str:
    if not 0 <= action.chunk < len(table.ranks):
        return f": there are {len(table.ranks)} chunks"
    if table.ranks[action.chunk] != rank:
        return f": the chunk belongs to rank {table.ranks[action.chunk]}"
    return ""


def _required(rank: int, row: Row, table: Table, num_micro_batches: int) -> Iterator[Action]:
    """Every action that the rank must run, with halves of backward where its row has one of them."""
    halves = {(one.chunk, one.micro_batch) for one in row if one.kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)}
    for chunk in table.chunks_of(rank):
        transfers = list(_transfers(chunk, rank, table))
        for number in range(num_micro_batches):
            yield Action(Kind.FORWARD, number, chunk)
            if (chunk, number) in halves:
                yield Action(Kind.INPUT_GRADIENT, number, chunk)
                yield Action(Kind.WEIGHT_GRADIENT, number, chunk)
            else:
                yield Action(Kind.BACKWARD, number, chunk)
            for kind, peer in transfers:
                yield Action(kind, number, chunk, peer)


def _transfers(chunk: int, rank: int, table: Table) -> Iterator[tuple[Kind, int]]:
    """(kind, peer) of the transfers of each micro batch in a chunk."""
    for neighbour, kinds in (
        (chunk - 1, (Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD)),
        (chunk + 1, (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD)),
    ):
        if 0 <= neighbour < len(table.ranks) and table.ranks[neighbour] != rank:
            for kind in kinds:
                yield kind, table.ranks[neighbour]


def _missing(action: Action, rank: int, table: Table, done: set[Action]) -> list[Action]:
    """The actions that this rank must complete before `action` and has not."""
    number, chunk = action.micro_batch, action.chunk

    def input_gradient(of: int) -> list[Action]:
        kinds = [Action(kind, number, of) for kind in BACKWARDS]
        return [] if any(one in done for one in kinds) else [kinds[0]]

    def arrived(receive: Kind) -> list[Action]:
        """The action that provides a neighbouring chunk's result: its receive, or its computation on this rank."""
        neighbour = chunk - RECEIVES[receive][1]
        if not 0 <= neighbour < len(table.ranks):
            return []
        if table.ranks[neighbour] != rank:
            return [one for one in [Action(receive, number, chunk, table.ranks[neighbour])] if one not in done]
        if receive is Kind.RECEIVE_BACKWARD:
            return input_gradient(neighbour)
        return [one for one in [Action(Kind.FORWARD, number, neighbour)] if one not in done]

    forward = [one for one in [Action(Kind.FORWARD, number, chunk)] if one not in done]
    match action.kind:
        case Kind.FORWARD:
            return arrived(Kind.RECEIVE_FORWARD)
        case Kind.BACKWARD | Kind.INPUT_GRADIENT:
            return [*forward, *arrived(Kind.RECEIVE_BACKWARD)]
        case Kind.SEND_FORWARD:
            return forward
        case Kind.WEIGHT_GRADIENT | Kind.SEND_BACKWARD:
            return input_gradient(chunk)
    return []


def _check_rendezvous(table: Table) -> None:
    """Simulate the table with sends and receives that block until the other side is ready; raise on a deadlock."""
    rows, at, moved = table.rows, [0] * len(table.rows), True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and (row[at[rank]].kind in COMPUTE or _meets(table, at, rank)):
                peer = row[at[rank]].peer
                if peer is not None:
                    at[peer] += 1
                at[rank], moved = at[rank] + 1, True
    stuck = [f"rank {rank} at {row[at[rank]]}" for rank, row in enumerate(rows) if at[rank] < len(row)]
    if stuck:
        raise ValueError(f"blocking sends deadlock: {', '.join(stuck)}")


def _meets(table: Table, at: list[int], rank: int) -> bool:
    """Whether the next action of `rank` is a send whose receive is the next action of its peer, or the reverse."""
    action = table.rows[rank][at[rank]]
    assert action.peer is not None
    if at[action.peer] == len(table.rows[action.peer]):
        return False
    if action.kind in TRANSFERS:
        other, further = TRANSFERS[action.kind]
    else:
        other, further = RECEIVES[action.kind][0], -RECEIVES[action.kind][1]
    awaited = Action(other, action.micro_batch, action.chunk + further, rank)
    return table.rows[action.peer][at[action.peer]] == awaited


def held(table: Table, rank: int) -> Iterator[tuple[Action, float]]:
    """After each action of a rank: the number of micro batches whose activations it holds.

    A forward pass adds a micro batch's activations in its chunk. They are freed by the backward pass; if that has two
    halves, by the second one, which needs the inputs of products.
    """
    share, live = 1 / len(table.chunks_of(rank)), 0
    for action in table.rows[rank]:
        live += action.kind is Kind.FORWARD
        live -= action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
        yield action, live * share


def peak(table: Table, rank: int) -> float:
    """The peak number of micro batches whose activations a rank holds."""
    return max(number for _, number in held(table, rank))


def _first_beyond(table: Table, rank: int, limit: float) -> Action:
    return next(action for action, number in held(table, rank) if number > limit)
