"""Which queries of a rank see which keys: attention as a few parts, each full or causal, as data.

S the local length, two chunks of a zigzag; R ranks. Keys of a chunk before a query's are all seen, keys of a later one
never, and a rank's two chunks one after the other are in the order of the sequence, so its own part is causal.

part                                     queries      keys           kind
own                                      both         both           causal
of a rank before this one                both         its early      full
of a rank after this one                 late         both           full
"""

from dataclasses import dataclass

from mplug_cp.zigzag import zigzag

Ranges = tuple[range, ...]


@dataclass(frozen=True)
class Block:
    """A part of attention.

    `queries` and `keys` are where they lie in the tensors at hand, `of_queries` and `of_keys` where in the sequence.
    """

    queries: slice
    keys: slice
    causal: bool
    of_queries: Ranges
    of_keys: Ranges


def ring_block(step: int, index: int, size: int, length: int, causal: bool) -> Block:
    """The part of a step of the ring, at which a rank has the keys of the rank `step` before it."""
    own, of = (zigzag(size * length, size, rank) for rank in (index, (index - step) % size))
    whole, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if not causal or step == 0:
        return Block(whole, whole, causal, own, of)
    if step <= index:
        return Block(whole, early, False, own, of[:1])
    return Block(late, whole, False, own[1:], of)


def own_block(index: int, size: int, length: int) -> Block:
    """The causal part of a rank's own keys."""
    return ring_block(0, index, size, length, causal=True)


def blocks_of_all(index: int, size: int, length: int, causal: bool) -> list[Block]:
    """The parts of the keys of all ranks, in the order of the sequence; where causal, all but the own part."""
    own, chunk = zigzag(size * length, size, index), length // 2
    whole, late = slice(0, length), slice(chunk, length)
    if not causal:
        return [Block(whole, slice(0, size * length), False, own, (range(size * length),))]
    before, between = range(index * chunk), range((index + 1) * chunk, own[1].start)
    found = [(whole, before, own), (late, between, own[1:])]
    return [Block(queries, slice(s.start, s.stop), False, of, (s,)) for queries, s, of in found if len(s)]
