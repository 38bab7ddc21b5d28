"""Pipeline schedules in a loop: chunk c belongs to rank c modulo the number of ranks. Pure functions, without torch.

p ranks with v chunks each, m micro batches. The module `v_shaped` has the schedules whose chunks go down the ranks and
up again.
"""

from collections.abc import Iterator
from functools import cache

from mplug_schedules import Action, Kind, Shape, Table, with_transfers

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741


@cache
def gpipe(shape: Shape) -> Table:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965)."""
    refuse(shape, "gpipe", 1)
    row = tuple(Action(kind, number) for kind in (F, B) for number in range(shape.num_micro_batches))
    rows = (tuple(action._replace(chunk=rank) for action in row) for rank in range(shape.num_ranks))
    return with_transfers(tuple(rows), loop(shape.num_ranks, 1))


@cache
def one_f_one_b(shape: Shape) -> Table:
    """One forward, one backward (PipeDream-Flush, arXiv 2006.09503; arXiv 2104.04473, figure 3).

    Rank r holds the activations of at most p - r micro batches.
    """
    refuse(shape, "1f1b", 1)
    return with_transfers(tuple(_one_f_one_b(rank, shape) for rank in range(shape.num_ranks)), loop(shape.num_ranks, 1))


def _one_f_one_b(rank: int, shape: Shape) -> tuple[Action, ...]:
    warmup = min(shape.num_ranks - rank, shape.num_micro_batches)
    actions = [Action(F, number, rank) for number in range(warmup)]
    for number in range(shape.num_micro_batches):
        actions.append(Action(B, number, rank))
        if warmup + number < shape.num_micro_batches:
            actions.append(Action(F, warmup + number, rank))
    return tuple(actions)


@cache
def interleaved(shape: Shape) -> Table:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): v >= 2 chunks per rank divide the bubble of 1F1B by v."""
    chunks = shape.chunks or 2
    if chunks < 2:
        raise ValueError("the schedule 'interleaved' needs 2 or more chunks per rank; for one chunk, use '1f1b'")
    refuse(shape, "interleaved", chunks, groups=True)
    p, each = shape.num_ranks, groups_of(shape)
    rows = []
    for rank in range(p):
        forwards, backwards = passes(rank, shape, chunks, each)
        warmup = min((chunks - 1) * each[0] + 2 * (p - 1 - rank), len(forwards))
        rows.append((*forwards[:warmup], *alternating(forwards[warmup:], backwards)))
    return with_transfers(tuple(rows), loop(p, chunks))


@cache
def zb_h1(shape: Shape) -> Table:
    """ZB-H1 (arXiv 2401.10241, section 3.1): 1F1B whose weight gradients fill the bubble at the end.

    It holds the activations of as many micro batches as 1F1B. With more chunks per rank, it is interleaved likewise.
    """
    chunks = shape.chunks or 1
    refuse(shape, "zb-h1", chunks, groups=True)
    p, each = shape.num_ranks, groups_of(shape)
    rows = []
    for rank in range(p):
        forwards, backwards = passes(rank, shape, chunks, each)
        inputs = halves(backwards)
        warmup = min((chunks - 1) * each[0] + p - 1 - rank, len(forwards))
        rows.append((*forwards[:warmup], *delaying(alternating(forwards[warmup:], inputs), delay=rank)))
    return with_transfers(tuple(rows), loop(p, chunks))


def passes(rank: int, shape: Shape, chunks: int, each: list[int]) -> tuple[list[Action], list[Action]]:
    """The forwards and the backwards of a rank: a group of micro batches passes all chunks, then the next one."""
    forwards, backwards, first = list[Action](), list[Action](), 0
    for size in each:
        numbers = range(first, first + size)
        for chunk in range(chunks):
            forwards += [Action(F, number, chunk * shape.num_ranks + rank) for number in numbers]
        for chunk in reversed(range(chunks)):
            backwards += [Action(B, number, chunk * shape.num_ranks + rank) for number in numbers]
        first += size
    return forwards, backwards


def alternating(forwards: list[Action], backwards: list[Action]) -> Iterator[Action]:
    """The remaining forwards, each followed by a backward; then the remaining backwards."""
    for number, backward in enumerate(backwards):
        yield from forwards[number : number + 1]
        yield backward


def halves(backwards: list[Action]) -> list[Action]:
    """The first halves of backward passes: their input gradients."""
    return [action._replace(kind=I) for action in backwards]


def delaying(actions: Iterator[Action], delay: int) -> Iterator[Action]:
    """Add weight gradients: each comes after `delay` further input gradients, the last ones at the end."""
    waiting = list[Action]()
    for action in actions:
        yield action
        if action.kind is I:
            waiting.append(action._replace(kind=W))
            if len(waiting) > delay:
                yield waiting.pop(0)
    yield from waiting


def groups_of(shape: Shape) -> list[int]:
    """Sizes of the groups of micro batches: about equal, and at least `group` (p by default), if there are enough."""
    m, least = shape.num_micro_batches, shape.group or shape.num_ranks
    if least < shape.num_ranks:
        raise ValueError(
            f"a group of {least} micro batches is smaller than the {shape.num_ranks} ranks, which would wait"
        )
    number = max(1, m // least)
    return [m // number + (index < m % number) for index in range(number)]


def loop(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each chunk: 0, 1, ..., p - 1, 0, 1, ..."""
    return tuple(range(num_ranks)) * chunks


def refuse(shape: Shape, name: str, chunks: int, groups: bool = False, limit: bool = False) -> None:
    """Raise ValueError for a setting of a shape that a schedule with this name does not have."""
    if shape.chunks not in (None, chunks):
        raise ValueError(
            f"the schedule '{name}' has {chunks} chunk{'s' * (chunks > 1)} per rank, not {shape.chunks}; leave "
            f"'chunks' at null, or use 'interleaved' or 'zb-h1'"
        )
    if shape.group is not None and not groups:
        raise ValueError(f"the schedule '{name}' has no groups of micro batches; leave 'group' at null")
    if shape.limit is not None and not limit:
        raise ValueError(f"the schedule '{name}' takes no memory limit; use 'zb-limited', or leave 'limit' at null")
