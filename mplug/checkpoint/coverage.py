"""Whether boxes cover a tensor: each element lies in exactly one of them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod

Box = tuple[Sequence[int], Sequence[int]]
"""Where a part of a tensor begins, and its shape."""
MOST_DIVIDED = 8
"""Dimensions along which a tensor may be divided: the check looks at 2 to this power corners of every box."""


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """Why boxes do not cover a tensor exactly once, in words; the empty string if they do.

    The time is linear in the number of boxes. The sum of the boxes' indicator functions is that of the whole tensor if
    and only if their mixed differences agree, and those of a box are its corners, with alternating signs.
    """
    found = [box for box in boxes if prod(box[1])]
    for start, size in found:
        if any(s + n > whole for s, n, whole in zip(start, size, shape, strict=True)):
            return "a chunk reaches beyond its shape"
    missing = prod(shape) - sum(prod(size) for _, size in found)
    if missing:
        return "its chunks do not cover its shape" if missing > 0 else "its chunks overlap"
    if not found:
        return ""
    divided = [axis for axis, whole in enumerate(shape) if any(size[axis] != whole for _, size in found)]
    if len(divided) > MOST_DIVIDED:
        return f"it is divided along {len(divided)} dimensions, and at most {MOST_DIVIDED} are supported"
    corners = Counter[tuple[int, ...]]()
    for start, size in found:
        _count_corners(corners, [(start[axis], start[axis] + size[axis]) for axis in divided], 1)
    _count_corners(corners, [(0, shape[axis]) for axis in divided], -1)
    return "its chunks overlap, and leave gaps" if any(corners.values()) else ""


def _count_corners(corners: "Counter[tuple[int, ...]]", spans: list[tuple[int, int]], sign: int) -> None:
    for corner in product((0, 1), repeat=len(spans)):
        where = tuple(span[end] for span, end in zip(spans, corner, strict=True))
        corners[where] += sign * (-1) ** sum(corner)
