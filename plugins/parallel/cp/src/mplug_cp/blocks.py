"""Which queries of a rank see which keys: attention as a few parts, each full or causal, as data.

S is the local length, two chunks of a zigzag; R ranks. A query sees every key of an earlier chunk and no key of a later
chunk. A rank's two chunks lie in sequence order, so the part of its own keys is causal. For causal attention:

keys of                                  queries      keys           kind
this rank                                both chunks  both chunks    causal
a rank before this one                   both chunks  early chunk    full
a rank after this one                    late chunk   both chunks    full
"""

from dataclasses import dataclass

from mplug_cp.zigzag import zigzag

Ranges = tuple[range, ...]


@dataclass(frozen=True)
class Block:
    """A part of attention.

    `queries` and `keys` are positions in the tensors passed to the part; `of_queries` and `of_keys` are the same
    positions in the whole sequence.
    """

    queries: slice
    keys: slice
    causal: bool
    of_queries: Ranges
    of_keys: Ranges


def ring_block(step: int, index: int, size: int, length: int, causal: bool) -> Block:
    """The part that rank `index` computes at a step of the ring, when it has the keys of rank `index - step`."""
    own, of = (zigzag(size * length, size, rank) for rank in (index, (index - step) % size))
    whole, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if not causal or step == 0:
        return Block(whole, whole, causal, own, of)
    if step <= index:
        return Block(whole, early, False, own, of[:1])
    return Block(late, whole, False, own[1:], of)


def own_block(index: int, size: int, length: int) -> Block:
    """The causal part of a rank's own keys and queries."""
    return ring_block(0, index, size, length, causal=True)


def blocks_of_all(index: int, size: int, length: int, causal: bool) -> list[Block]:
    """The parts for the gathered keys, in sequence order; for causal attention, without the rank's own part."""
    own, chunk = zigzag(size * length, size, index), length // 2
    whole, late = slice(0, length), slice(chunk, length)
    if not causal:
        return [Block(whole, slice(0, size * length), False, own, (range(size * length),))]
    before, between = range(index * chunk), range((index + 1) * chunk, own[1].start)
    found = [(whole, before, own), (late, between, own[1:])]
    return [Block(queries, slice(s.start, s.stop), False, of, (s,)) for queries, s, of in found if len(s)]
