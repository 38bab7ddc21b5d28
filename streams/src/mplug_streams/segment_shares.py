"""Which rank computes which segments of a stream, if ranks that read different samples balance them. Pure.

R data ranks have a micro batch each. Along the axes that share streams (`Axis.shares_streams`), C ranks have the same
one. The b-th of the R C bins belongs to the share b % C of the data rank b // C. All ranks compute the same table from
the lengths of all segments.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """A segment: the data rank whose micro batch has it, and its number there."""

    source: int
    number: int


def assigned(work: Sequence[Sequence[int]], shares: int) -> list[list[Place]]:
    """The segments of each bin, in the order of their places; `work` is that of each segment of each data rank.

    The segment with the most work comes first; each goes to the bin with the least work so far. (The largest sum of a
    bin is at most 4/3 of the best one: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969.) Among bins with
    equal work, those of the segment's own rank come first, so equal segments on all ranks stay where they are.
    """
    segments = [(-one, number, source) for source, row in enumerate(work) for number, one in enumerate(row)]
    sums = [0] * (len(work) * shares)
    bins: list[list[Place]] = [[] for _ in sums]
    least = [(0, one) for one in range(len(sums))]
    for negative, number, source in sorted(segments):
        while least[0][0] != sums[least[0][1]]:
            heapq.heappop(least)  # the bin has more work by now
        homes = range(source * shares, (source + 1) * shares)
        chosen = next((one for one in homes if sums[one] == least[0][0]), least[0][1])
        bins[chosen].append(Place(source, number))
        sums[chosen] -= negative
        heapq.heappush(least, (sums[chosen], chosen))
    return [sorted(places) for places in bins]
