"""The division of a sample by its documents: short ones stay whole on a rank, long ones are divided. Pure, no torch.

Every rank holds exactly an R-th of the positions of a sample, so nothing is padded: where whole documents leave room,
further documents are divided to fill it. The linear work of all ranks is then equal, and the division balances
attention, which costs the pairs of positions. R ranks.

A document that is divided by k lies on k ranks in zigzag: each rank holds two of 2 k chunks, one from each end. The
degree k differs from document to document. A division places the documents of a sample by decreasing length:

    divided    each portion fits into an R-th of the sample, and its pairs do not exceed a limit
    whole      on the rank with the fewest pairs that has room; if none has, it is divided over ranks with room

Several limits are tried. Of the divisions whose busiest rank has at most `CLOSE` times the mean work, the one that
divides the fewest tokens is chosen; without any, the one with the most equal work. All of it is a function of the
lengths, so every rank computes the same division.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from mplug import DocumentMap, Ranges
from mplug_cp.zigzag import zigzag

CLOSE = 1.02
"""The largest work of a rank, over the mean, at which no more documents are divided."""
LIMITS = (1.0, 0.5, 0.25, 0.125, 0.0)
"""The largest number of pairs of a portion, in those that the busiest rank may have."""


def document_map(equal_length: int) -> DocumentMap:
    """The index map of a sequence that is divided by documents."""
    return DocumentMap(
        zigzag,
        partial(_divided_at, equal_length),
        partial(_work_at, equal_length),
        "documents are whole on a rank if they fit and leave all ranks equal work, and divided over several if not",
    )


def _divided_at(equal_length: int, lengths: tuple[int, ...], size: int) -> tuple[Ranges, ...]:
    return divided(lengths, size, equal_length)


def _work_at(equal_length: int, lengths: Sequence[int], held: Ranges) -> int:
    return work_of(lengths, held, equal_length)


def pairs_of(start: int, stop: int) -> int:
    """The pairs of a query in [start, stop) of a document and a key that it sees; positions count from its begin."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def work_of(lengths: Sequence[int], held: Ranges, equal_length: int) -> int:
    """The work of a rank that holds these ranges of a sample: pairs, and positions as pairs.

    A position costs outside of attention what a document of `equal_length` costs in attention, for each position.
    """
    found, begin = sum(map(len, held)) * (equal_length // 2), 0
    for length in lengths:
        for part in held:
            start, stop = max(part.start, begin), min(part.stop, begin + length)
            if start < stop:
                found += pairs_of(start - begin, stop - begin)
        begin += length
    return found


@lru_cache(maxsize=4096)
def divided(lengths: tuple[int, ...], size: int, equal_length: int) -> tuple[Ranges, ...]:
    """The ranges of a sample that each rank holds, in sequence order; the lengths of documents sum to its length.

    Raises UsageError unless 2 `size` divides the length of the sample, as the zigzag of one document does.
    """
    total = sum(lengths)
    alone = tuple(zigzag(total, size, rank) for rank in range(size))
    if size == 1 or max(lengths, default=0) == total:
        return alone
    pairs, linear = sum(pairs_of(0, one) for one in lengths), total * (equal_length // 2)
    allowed = max(1, int((CLOSE * (pairs + linear) - linear) / size))
    tried = [_placed(lengths, size, int(part * allowed)) for part in LIMITS]
    close = [one for one in tried if max(one.pairs) <= allowed]
    if close:
        chosen = min(close, key=lambda one: (one.exchanged, max(one.pairs)))
    else:
        chosen = min(tried, key=lambda one: (max(one.pairs), one.exchanged))
    return chosen.ranges


@dataclass
class Placed:
    """Documents on ranks: for each rank, the positions that are free, its pairs, and what it holds."""

    room: list[int]
    pairs: list[int]
    held: list[list[range]] = field(default_factory=list)
    exchanged: int = 0

    def put(self, rank: int, begin: int, start: int, stop: int) -> None:
        """Give a rank the part [start, stop) of the document that begins at `begin`."""
        if start < stop:
            self.held[rank].append(range(begin + start, begin + stop))
            self.room[rank] -= stop - start
            self.pairs[rank] += pairs_of(start, stop)

    @property
    def ranges(self) -> tuple[Ranges, ...]:
        """The ranges of each rank in sequence order, adjacent ones joined."""
        return tuple(_joined(held) for held in self.held)


def _placed(lengths: Sequence[int], size: int, limit: int) -> Placed:
    """The documents on ranks; the portions of divided ones have at most `limit` pairs, if that many ranks have room."""
    share = sum(lengths) // size
    found = Placed([share] * size, [0] * size, [[] for _ in range(size)])
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    for number in sorted((n for n, length in enumerate(lengths) if length), key=lambda n: (-lengths[n], n)):
        length, pairs = lengths[number], pairs_of(0, lengths[number])
        degree = max(-(-length // share), -(-pairs // limit) if limit else size)
        ranks, portions = _portions(found, length, min(degree, size))
        found.exchanged += length * (len(ranks) - 1)
        _zigzag(found, begins[number], length, ranks, portions)
    return found


def _portions(found: Placed, length: int, degree: int) -> tuple[list[int], list[int]]:
    """The ranks of a document and the positions of each: `degree` of them, or as many as its length needs."""
    order = sorted(range(len(found.room)), key=lambda rank: (found.pairs[rank], -found.room[rank], rank))
    for number in range(degree, len(order) + 1):
        each = -(-length // number)
        free = [rank for rank in order if found.room[rank] >= each][:number]
        if len(free) == number:
            return free, [length * (place + 1) // number - length * place // number for place in range(number)]
    ranks, portions, rest = list[int](), list[int](), length
    for rank in sorted(order, key=lambda rank: -found.room[rank]):  # no equal portions fit: fill up
        if rest and found.room[rank]:
            ranks.append(rank)
            portions.append(min(found.room[rank], rest))
            rest -= portions[-1]
    return ranks, portions


def _zigzag(found: Placed, begin: int, length: int, ranks: Sequence[int], portions: Sequence[int]) -> None:
    """Give each rank a chunk from each end of a document. Halves are equal; with unequal portions, the work is not."""
    if len(ranks) == 1:
        found.put(ranks[0], begin, 0, length)
        return
    early, late = 0, length
    for rank, portion in zip(ranks, portions, strict=True):
        first = portion // 2
        found.put(rank, begin, early, early + first)
        found.put(rank, begin, late - (portion - first), late)
        early, late = early + first, late - (portion - first)


def _joined(held: Sequence[range]) -> Ranges:
    found = list[range]()
    for part in sorted(held, key=lambda part: part.start):
        if found and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop)
        else:
            found.append(part)
    return tuple(found)
