"""Which conversations share a sample."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], capacity: int, most: int) -> list[list[int]]:
    """The items of each bin: at most `capacity` in total, and at most `most` items.

    The longest item comes first (of equals, the earlier one), and goes where it leaves the least room. It uses at most
    11/9 of the bins of the best packing, and 1 more, where `most` does not bind (Johnson, 1973). O(n log n) and, for
    every item, a search among the distinct rooms that bins have left.
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
        left = room - length
        if left and len(bins[chosen]) < most:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(chosen)
    return bins
