"""Check that boxes cover a tensor: each element is in exactly one box."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod

Box = tuple[Sequence[int], Sequence[int]]
"""The start and the shape of a part of a tensor."""
MOST_DIVIDED = 8
"""Maximum number of dimensions along which a tensor is divided. The check visits 2 to this power corners per box."""


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """The reason why boxes do not cover a tensor exactly once; the empty string if they do.

    The boxes cover the tensor exactly once if the sum of their indicator functions is the indicator function of the
    tensor. Two such functions are equal if and only if their mixed differences are equal. The mixed difference of a box
    is non-zero only at its corners, with alternating signs. So the time is linear in the number of boxes.
    """
    nonempty = [box for box in boxes if prod(box[1])]
    for start, size in nonempty:
        if any(s + n > whole for s, n, whole in zip(start, size, shape, strict=True)):
            return "a chunk exceeds its shape"
    missing = prod(shape) - sum(prod(size) for _, size in nonempty)
    if missing:
        return "its chunks do not cover its shape" if missing > 0 else "its chunks overlap"
    if not nonempty:
        return ""
    divided = [axis for axis, whole in enumerate(shape) if any(size[axis] != whole for _, size in nonempty)]
    if len(divided) > MOST_DIVIDED:
        return f"its chunks divide {len(divided)} dimensions, but at most {MOST_DIVIDED} are supported"
    corners = Counter[tuple[int, ...]]()
    for start, size in nonempty:
        _count_corners(corners, [(start[axis], start[axis] + size[axis]) for axis in divided], 1)
    _count_corners(corners, [(0, shape[axis]) for axis in divided], -1)
    return "its chunks overlap and leave gaps" if any(corners.values()) else ""


def _count_corners(corners: "Counter[tuple[int, ...]]", spans: list[tuple[int, int]], sign: int) -> None:
    for corner in product((0, 1), repeat=len(spans)):
        where = tuple(span[end] for span, end in zip(spans, corner, strict=True))
        corners[where] += sign * (-1) ** sum(corner)
