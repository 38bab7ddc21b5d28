"""When each action of a pipeline table runs, given the durations of computations and transfers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mplug_schedules.actions import BACKWARDS, COMPUTE, Action, Kind, Table


@dataclass(frozen=True)
class Costs:
    """Durations of the passes of one micro batch in one chunk, in any unit. `transfer` is that between two ranks.

    `backward` is that of a whole backward pass; None: the sum of its halves.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    transfer: float = 0.0
    backward: float | None = None

    def of(self, kind: Kind) -> float:
        """The duration of a computation."""
        halves = self.input_gradient + self.weight_gradient
        return {
            Kind.FORWARD: self.forward,
            Kind.INPUT_GRADIENT: self.input_gradient,
            Kind.WEIGHT_GRADIENT: self.weight_gradient,
            Kind.BACKWARD: halves if self.backward is None else self.backward,
        }[kind]


@dataclass(frozen=True)
class Span:
    """An executed computation."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """The computations of each rank with their times."""

    rows: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> float:
        """The time from the first computation of any rank to the end of the last one."""
        return max(row[-1].stop for row in self.rows) - min(row[0].start for row in self.rows)

    @property
    def longest_row(self) -> float:
        """The longest time of a rank from its first computation to its last: what papers call the cost of a step."""
        return max(row[-1].stop - row[0].start for row in self.rows)

    def busy(self, rank: int) -> float:
        """The time that a rank computes."""
        return sum(one.stop - one.start for one in self.rows[rank])

    @property
    def bubble(self) -> float:
        """The share of `length` in which ranks are idle, on average over the ranks."""
        busy = sum(self.busy(rank) for rank in range(len(self.rows)))
        return 1 - busy / (self.length * len(self.rows))

    @property
    def bubble_of_papers(self) -> float:
        """The idle share of `longest_row`, in the rank with the least work (arXiv 2401.10241, section 5.3)."""
        return 1 - max(self.busy(rank) for rank in range(len(self.rows))) / self.longest_row


def timeline(table: Table, costs: Costs | Sequence[Costs]) -> Timeline:
    """The times of a table whose computations start as early as possible, in the order of their row.

    `costs` are those of every chunk, or a list with an entry for each chunk. Transfers overlap with computations.
    """
    each = [costs] * len(table.ranks) if isinstance(costs, Costs) else list(costs)
    rows = [[action for action in row if action.kind in COMPUTE] for row in table.rows]
    runs: list[list[Span]] = [[] for _ in rows]
    ends = dict[tuple[bool, int, int], float]()  # (is forward, chunk, micro batch) -> the end of its computation
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while len(runs[rank]) < len(row):
                action = row[len(runs[rank])]
                begin = _begin(action, table, each, ends)
                if begin is None:
                    break
                start = max(begin, runs[rank][-1].stop if runs[rank] else 0.0)
                stop = start + each[action.chunk].of(action.kind)
                runs[rank].append(Span(action, start, stop))
                if action.kind is not Kind.WEIGHT_GRADIENT:
                    ends[action.kind is Kind.FORWARD, action.chunk, action.micro_batch] = stop
                moved = True
    return Timeline(tuple(map(tuple, runs)))


def _begin(
    action: Action, table: Table, costs: Sequence[Costs], ends: Mapping[tuple[bool, int, int], float]
) -> float | None:
    """The time at which the input of a computation from another chunk is available; None if it is not computed yet."""
    chunk, further = action.chunk, -1 if action.kind is Kind.FORWARD else 1
    source = chunk + further
    if action.kind is Kind.WEIGHT_GRADIENT or not 0 <= source < len(table.ranks):
        return 0.0
    end = ends.get((action.kind not in BACKWARDS, source, action.micro_batch))
    return None if end is None else end + (costs[source].transfer if table.ranks[source] != table.ranks[chunk] else 0.0)
