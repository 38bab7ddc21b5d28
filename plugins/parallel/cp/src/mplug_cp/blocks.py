"""Which queries of a rank see which keys: attention as a few parts, as data.

S is the local length, two chunks of a zigzag; R ranks. A rank's two chunks lie in sequence order, so the part of its
own keys is causal. Without windows and groups, a query of causal attention sees every key of an earlier chunk and no
key of a later one:

keys of                                  queries      keys           kind
this rank                                both chunks  both chunks    causal
a rank before this one                   both chunks  early chunk    full
a rank after this one                    late chunk   both chunks    full

With windows or groups, the part of a rank's own keys is computed by position. Every other pair of chunks is a part for
itself, cut to the queries and keys that see each other. Most pairs have no such queries, so there is no part.
"""

from dataclasses import dataclass
from functools import cache

from mplug_cp.zigzag import zigzag
from mplug_nn.parts import Ranges


@dataclass(frozen=True)
class Sight:
    """Which keys a query sees by its position: `causal` and `window` as in `mplug_nn.AttentionSpec`.

    `grouped`: a query of causal attention also sees the later keys of its own group.
    """

    causal: bool
    window: int | None = None
    grouped: bool = False

    @property
    def by_position(self) -> bool:
        """Whether parts are computed by position."""
        return self.window is not None or self.grouped

    @property
    def own_first(self) -> bool:
        """Whether the part of a rank's own keys is apart from the gathered keys."""
        return self.causal or self.by_position

    def keys_of(self, queries: range, length: int) -> range:
        """The positions, of `length`, among which are all keys that these queries may see."""
        first = 0 if self.window is None else max(0, queries.start - self.window + 1)
        return range(first, self._last(queries, length))

    def queries_of(self, keys: range, length: int) -> range:
        """The positions, of `length`, among which are all queries that may see these keys."""
        last = length if self.window is None else min(length, keys.stop + self.window - 1)
        if not self.causal:
            return range(0 if self.window is None else max(0, keys.start - self.window + 1), last)
        return range(0 if self.grouped else keys.start, last)

    def sees_all(self, queries: range, keys: range) -> bool:
        """Whether each query sees each key, whatever the groups."""
        before, after = queries.stop - 1 - keys.start, keys.stop - 1 - queries.start  # the largest distances
        if self.causal and after > 0:
            return False
        return self.window is None or max(before, after) < self.window

    def _last(self, queries: range, length: int) -> int:
        if self.causal:
            return length if self.grouped else queries.stop
        return length if self.window is None else min(length, queries.stop + self.window - 1)


@dataclass(frozen=True)
class Block:
    """A part of attention.

    `queries` and `keys` are positions in the tensors passed to the part; `of_queries` and `of_keys` are the same
    positions in the whole sequence. A part is full, causal, or computed by position.
    """

    queries: slice
    keys: slice
    causal: bool
    of_queries: Ranges
    of_keys: Ranges
    by_position: bool = False


def ring_blocks(step: int, index: int, size: int, length: int, sight: Sight) -> tuple[Block, ...]:
    """The parts that rank `index` computes at a step of the ring, when it has the keys of rank `index - step`."""
    own, of = (zigzag(size * length, size, rank) for rank in (index, (index - step) % size))
    whole, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if step == 0:
        return (Block(whole, whole, sight.causal, own, own, sight.by_position),)
    if sight.by_position:
        chunks = ((part, number * (length // 2)) for number, part in enumerate(of))
        return tuple(block for part, at in chunks for block in _seen(own, part, at, size * length, sight))
    if not sight.causal:
        return (Block(whole, whole, False, own, of),)
    if step <= index:
        return (Block(whole, early, False, own, of[:1]),)
    return (Block(late, whole, False, own[1:], of),)


@cache
def steps_of(size: int, length: int, sight: Sight) -> tuple[int, ...]:
    """The steps of the ring at which some rank computes something; keys travel past the others at once."""
    ranks = range(size)
    return tuple(step for step in ranks if any(ring_blocks(step, index, size, length, sight) for index in ranks))


def own_block(index: int, size: int, length: int, sight: Sight) -> Block:
    """The part of a rank's own keys and queries."""
    (block,) = ring_blocks(0, index, size, length, sight)
    return block


def blocks_of_all(index: int, size: int, length: int, sight: Sight) -> tuple[Block, ...]:
    """The parts for the gathered keys, in sequence order; without the rank's own part, if that is apart."""
    own, chunk, everything = zigzag(size * length, size, index), length // 2, size * length
    whole, late = slice(0, length), slice(chunk, length)
    if not sight.own_first:
        return (Block(whole, slice(0, everything), False, own, (range(everything),)),)
    before, between = range(own[0].start), range(own[0].stop, own[1].start)
    if sight.by_position:
        others = (before, between, range(own[1].stop, everything))
        return tuple(block for part in others for block in _seen(own, part, part.start, everything, sight))
    found = [(whole, before, own), (late, between, own[1:])]
    return tuple(Block(queries, slice(s.start, s.stop), False, of, (s,)) for queries, s, of in found if len(s))


def _seen(own: Ranges, keys: range, at: int, length: int, sight: Sight) -> list[Block]:
    """The parts of a rank's chunks and other keys, which begin at index `at` of their tensor; cut to what is seen."""
    found, begin = [], 0
    for chunk in own:
        part = _common(keys, sight.keys_of(chunk, length))
        queries = _common(chunk, sight.queries_of(part, length)) if part else range(0)
        if queries:
            of_queries = slice(begin + queries.start - chunk.start, begin + queries.stop - chunk.start)
            of_keys = slice(at + part.start - keys.start, at + part.stop - keys.start)
            everything = sight.sees_all(queries, part)
            causal = sight.causal and not everything
            found.append(Block(of_queries, of_keys, causal, (queries,), (part,), not everything))
        begin += len(chunk)
    return found


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
