"""Bin packing: decides which conversations share a sample."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], capacity: int, most: int) -> list[list[int]]:
    """The items of each bin: at most `capacity` in total, and at most `most` items.

    Items are placed by decreasing length (ties: the earlier one first), each into the bin where it leaves the least
    room. If `most` does not bind, it uses at most 11/9 of the bins of the best packing, plus 1 (Johnson, 1973). The
    cost is O(n log n), plus a binary search per item among the distinct free lengths of the bins.
    """
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of `with_room`, sorted
    for item in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[item]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[place]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        bins[chosen].append(item)
        remaining = room - length
        if remaining and len(bins[chosen]) < most:
            if remaining not in with_room:
                with_room[remaining] = []
                insort(rooms, remaining)
            with_room[remaining].append(chosen)
    return bins
