"""The zigzag split of a sequence, which gives all ranks the same work under a causal mask.

The sequence has 2 R equal chunks. Rank r of R holds the r-th chunk from the start and the r-th from the end. The less
work its early chunk causes, the more its late chunk causes (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from mplug import UsageError


def zigzag(length: int, size: int, index: int) -> tuple[range, ...]:
    """The chunks of rank `index` of `size`, in sequence order; a single rank has the whole sequence.

    Raises UsageError unless 2 `size` divides `length`.
    """
    if size == 1:
        return (range(length),)
    if length % (2 * size):
        raise UsageError(
            f"cp={size} splits a sequence into {2 * size} chunks, two per rank, and {2 * size} does not divide its "
            f"length {length}; change trainer.seq_length, cp or parallel.cp.method"
        )
    chunk, late = length // (2 * size), 2 * size - 1 - index
    return range(index * chunk, (index + 1) * chunk), range(late * chunk, (late + 1) * chunk)


def held_at(size: int) -> list[int]:
    """For each chunk in sequence order, its index in the list of all ranks' chunks, concatenated in rank order."""
    return [2 * chunk if chunk < size else 2 * (2 * size - 1 - chunk) + 1 for chunk in range(2 * size)]


def chunks_held(size: int) -> list[int]:
    """The numbers of all ranks' chunks, concatenated in rank order: the inverse of `held_at`."""
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
