"""Which keys of a micro batch every rank needs from others, if samples are divided by documents. Pure, no torch.

Positions are numbered through all samples of a micro batch: position p of sample b is b S + p. A rank holds its
positions in this order. A *fragment* is a stretch of one document on one rank. A query of causal attention sees the
keys of its document before it: those on its own rank, in the order in which the rank holds them, and those in the gaps
between the rank's fragments. The queries behind a gap see all of it, so each gap is a part of attention without a mask:

    rank 0     aaaa........aaaa        own keys, causal: aaaaaaaa      the gap: last 4 queries, 8 keys
    rank 1     ....aaaaaaaa....        own keys, causal: aaaaaaaa      the gap: all 8 queries, 4 keys

Gaps with the same number within their documents are computed together, a segment for each document. Nothing is sent of
a document that is whole on a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from mplug import Ranges
from mplug_cp.blocks import Sight
from mplug_cp.division import divided

Rows = tuple[tuple[int, ...], ...]
"""The lengths of the documents of each sample of a micro batch."""


@dataclass(frozen=True)
class Gap:
    """Keys of one document on other ranks, and the rank's queries that see some of them; positions."""

    queries: Ranges
    keys: Ranges


@dataclass(frozen=True)
class Needs:
    """What a rank computes and receives.

    `held`: its positions; `lengths`: how many of each document. `parts`: gaps that are computed together.
    """

    held: Ranges
    lengths: tuple[int, ...]
    parts: tuple[tuple[Gap, ...], ...]

    @property
    def keys(self) -> list[range]:
        """All keys that it needs from other ranks, each once, in the order of positions."""
        return sorted((keys for part in self.parts for gap in part for keys in gap.keys), key=lambda keys: keys.start)


@lru_cache(maxsize=64)
def needs_of(rows: Rows, size: int, equal_length: int, sight: Sight) -> tuple[Needs, ...]:
    """The needs of every rank."""
    length, held = sum(rows[0]), [list[range]() for _ in range(size)]
    for sample, lengths in enumerate(rows):
        for rank, ranges in enumerate(divided(lengths, size, equal_length)):
            held[rank] += [range(sample * length + one.start, sample * length + one.stop) for one in ranges]
    ends = list(accumulate(one for lengths in rows for one in lengths))
    documents = [range(stop - one, stop) for stop, one in zip(ends, (n for row in rows for n in row), strict=True)]
    return tuple(_needs(tuple(ranges), documents, sight) for ranges in held)


def _needs(held: Ranges, documents: Sequence[range], sight: Sight) -> Needs:
    fragments = _fragments(held, documents)
    parts = list[list[Gap]]()
    for document, own in zip(documents, fragments, strict=True):
        for number, gap in enumerate(_gaps(document, own, sight)):
            if number == len(parts):
                parts.append([])
            parts[number].append(gap)
    return Needs(held, tuple(sum(map(len, own)) for own in fragments), tuple(map(tuple, parts)))


def _fragments(held: Ranges, documents: Sequence[range]) -> list[list[range]]:
    """For each document, its stretches among the held positions, in order; both arguments are in order."""
    found, first = [], 0
    for document in documents:
        own = list[range]()
        while first < len(held) and held[first].stop <= document.start:
            first += 1
        place = first
        while place < len(held) and held[place].start < document.stop:
            part = range(max(held[place].start, document.start), min(held[place].stop, document.stop))
            own += [part] if part else []
            place += 1
        found.append(own)
    return found


def _gaps(document: range, own: Sequence[range], sight: Sight) -> list[Gap]:
    """The gaps of a document with fragments `own` on a rank; without a causal mask, all gaps are one."""
    if not own:
        return []
    starts = [document.start, *(part.stop for part in own)]
    between = [range(start, part.start) for start, part in zip(starts, own, strict=False)]
    if not sight.causal:
        keys = tuple(gap for gap in (*between, range(own[-1].stop, document.stop)) if gap)
        return [Gap(tuple(own), keys)] if keys else []
    found = []
    for number, (gap, part) in enumerate(zip(between, own, strict=True)):
        first = gap.start if sight.window is None else max(gap.start, part.start - sight.window + 1)
        if first < gap.stop:
            found.append(Gap(tuple(own[number:]), (range(first, gap.stop),)))
    return found
