"""Which ranks keep a second copy of the state of a rank. Torch-free."""

from collections.abc import Collection


def keeper(rank: int, size: int) -> int:
    """The rank that keeps a second copy of what a rank owns: that of the other half of the ranks, or the next one."""
    return (rank + max(size // 2, 1)) % size


def covers(ranks: Collection[int], size: int) -> bool:
    """Whether processes of these ranks together hold the state of a run of `size` ranks."""
    return all(rank in ranks or keeper(rank, size) in ranks for rank in range(size))
