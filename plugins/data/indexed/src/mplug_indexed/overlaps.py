"""Refuses an index whose sequences share tokens of the `.bin`: the sign of damage or of a faulty writer."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mplug import UsageError

CHUNK = 1 << 20
"""Sequences compared at once, which bounds temporary memory if they are in file order."""


def refuse_overlaps(lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int, index: Path) -> None:
    """Raise UsageError that names two sequences with common bytes, if there are any. Lengths must be 0 or more."""
    if _in_order(lengths, pointers, itemsize):
        return
    (filled,) = np.nonzero(lengths)
    order = filled[np.argsort(pointers[filled], kind="stable")]
    starts = pointers[order]
    ends = starts + lengths[order].astype(np.int64) * itemsize
    overlapping = starts[1:] < ends[:-1]
    if overlapping.any():
        place = int(overlapping.argmax())
        first, second = (int(order[number]) for number in (place, place + 1))
        raise UsageError(
            f"'{index}' is damaged: sequences {first} and {second} overlap (bytes {starts[place]} to {ends[place]} and "
            f"{starts[place + 1]} to {ends[place + 1]}); copy both files again, or preprocess again"
        )


def _in_order(lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int) -> bool:
    """Whether every sequence begins at or after the end of the previous one, as in files that `Writer` makes."""
    for start in range(0, len(lengths) - 1, CHUNK):
        part = slice(start, start + CHUNK + 1)
        ends = pointers[part] + lengths[part].astype(np.int64) * itemsize
        if (pointers[part][1:] < ends[:-1]).any():
            return False
    return True
