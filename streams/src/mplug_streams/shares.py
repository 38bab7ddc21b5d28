"""Which rank computes which segments of a stream, if ranks that read different samples balance them. Pure.

R data ranks have a micro batch each. Along the axes that share streams (`Axis.shares_streams`), C ranks have the same
one. The b-th of the R C bins belongs to the share b % C of the data rank b // C. All ranks compute the same table from
the lengths of all segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from mplug_streams.segment_shares import Place


@dataclass(frozen=True)
class Shares:
    """The segments of one stream of all data ranks, divided among bins.

    `lengths` are those of the segments of each data rank, in rows; `group` rows are one after the tower has joined
    them. The ranks of sequence parallelism divide a bin's groups into `splits` equal parts.
    """

    lengths: Sequence[Sequence[int]]
    bins: Sequence[Sequence[Place]]
    shares: int
    group: int = 1
    splits: int = 1

    def rows_in(self, one: int) -> int:
        """The number of rows of a bin, without padding."""
        return sum(self.lengths[place.source][place.number] for place in self.bins[one])

    def num_groups(self, data_rank: int) -> int:
        """The number of groups of each share of a data rank, with padding; at least 1."""
        most = max(self.rows_in(one) for one in self._bins_of(data_rank)) // self.group
        return max(-(-most // self.splits), 1) * self.splits

    def padding(self, one: int) -> int:
        """The number of groups that are appended to a bin."""
        return self.num_groups(one // self.shares) - self.rows_in(one) // self.group

    def leaving(self, source: int, share: int) -> list[list[range]]:
        """For each data rank, the rows of the data rank `source` that it computes in this share: spans of numbers."""
        starts, found = self._starts[source], list[list[range]]()
        for rank in range(len(self.lengths)):
            spans: list[range] = []
            for at in (place.number for place in self.bins[rank * self.shares + share] if place.source == source):
                begin = spans.pop().start if spans and spans[-1].stop == starts[at] else starts[at]
                spans.append(range(begin, starts[at + 1]))
            found.append(spans)
        return found

    def arriving(self, one: int) -> list[int]:
        """The number of rows that each data rank sends to a bin."""
        found = [0] * len(self.lengths)
        for source, number in self.bins[one]:
            found[source] += self.lengths[source][number]
        return found

    def returned(self, data_rank: int) -> list[list[int]]:
        """For each data rank, the numbers of the groups that a data rank has computed for it.

        They are numbers among the groups of all its shares. Their order is that in which `order_at_home` expects them.
        """
        found: list[list[int]] = [[] for _ in self.lengths]
        each = self.num_groups(data_rank)
        for share, one in enumerate(self._bins_of(data_rank)):
            at = share * each
            for source, number in self.bins[one]:
                count = self.lengths[source][number] // self.group
                found[source].extend(range(at, at + count))
                at += count
        return found

    def order_at_home(self, source: int) -> list[int]:
        """For each group of a data rank's own micro batch, its number among the groups as they return."""
        first, at = [0] * len(self.lengths[source]), 0
        for number in (place.number for places in self.bins for place in places if place.source == source):
            first[number] = at
            at += self.lengths[source][number] // self.group
        return [
            first[number] + group
            for number, length in enumerate(self.lengths[source])
            for group in range(length // self.group)
        ]

    def returning(self, source: int) -> list[int]:
        """The number of groups that each data rank returns to a data rank."""
        return [
            sum(
                self.lengths[source][place.number] // self.group
                for one in self._bins_of(rank)
                for place in self.bins[one]
                if place.source == source
            )
            for rank in range(len(self.lengths))
        ]

    def _bins_of(self, data_rank: int) -> range:
        return range(data_rank * self.shares, (data_rank + 1) * self.shares)

    @cached_property
    def _starts(self) -> list[list[int]]:
        return [[0, *accumulate(row)] for row in self.lengths]
