"""Bin packing by two budgets: tokens, and rows of the model's streams."""

from collections.abc import Sequence
from typing import NamedTuple


class Size(NamedTuple):
    """Tokens of a conversation, and rows of its media."""

    tokens: int
    rows: int


def pack(sizes: Sequence[Size], budget: Size, most: int) -> list[list[int]]:
    """The items of each bin: within the budget in total, and at most `most` items.

    The largest items, by their larger share of a budget, are placed first, each into the bin with the fewest free
    tokens in which it fits. Bins are in the order of their first items.
    """

    def share(item: int) -> float:
        return max(sizes[item].tokens / budget.tokens, sizes[item].rows / max(budget.rows, 1))

    bins, free = list[list[int]](), list[Size]()
    for item in sorted(range(len(sizes)), key=lambda item: (-share(item), item)):
        tokens, rows = sizes[item]
        fitting = [
            number
            for number, room in enumerate(free)
            if room.tokens >= tokens and room.rows >= rows and len(bins[number]) < most
        ]
        if fitting:
            chosen = min(fitting, key=lambda number: free[number])
        else:
            chosen = len(bins)
            bins.append([])
            free.append(budget)
        bins[chosen].append(item)
        free[chosen] = Size(free[chosen].tokens - tokens, free[chosen].rows - rows)
    return sorted(sorted(items) for items in bins)
