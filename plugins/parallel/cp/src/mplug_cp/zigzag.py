"""Who holds what of a sequence, so that a causal mask leaves all ranks the same work.

As in Llama 3 (arXiv 2407.21783, section 3.3.2).
Of 2 R equal chunks, rank r of R holds the r-th and, from the end, the r-th again: what it attends to with the early
one, it lacks with the late one.
"""

from mplug import UsageError


def zigzag(length: int, size: int, index: int) -> tuple[range, ...]:
    """The chunks of the `index`-th of `size` ranks, in order; 2 `size` must divide `length`. One rank has all."""
    if size == 1:
        return (range(length),)
    if length % (2 * size):
        raise UsageError(f"{size} ranks hold two chunks each, and {2 * size} chunks do not divide a length of {length}")
    chunk, late = length // (2 * size), 2 * size - 1 - index
    return range(index * chunk, (index + 1) * chunk), range(late * chunk, (late + 1) * chunk)


def held_at(size: int) -> list[int]:
    """Of every chunk of the sequence, its place among the chunks of all ranks, one rank's after the other's."""
    return [2 * chunk if chunk < size else 2 * (2 * size - 1 - chunk) + 1 for chunk in range(2 * size)]


def chunks_held(size: int) -> list[int]:
    """The chunks of all ranks, one rank's after the other's: the inverse of `held_at`."""
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
