"""Sequences of an index that share tokens: two of them at one place of the `.bin` is damage, or a wrong writer."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mplug import UsageError

CHUNK = 1 << 20
"""Sequences that are compared at once: temporary memory stays small where they stand in the order of the file."""


def refuse_overlaps(lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int, index: Path) -> None:
    """UsageError that names two sequences with common bytes; empty ones have none. Lengths must be 0 or more."""
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
    """Whether every sequence begins where the one before it ends, or later: so it is in files as they are written."""
    for start in range(0, len(lengths) - 1, CHUNK):
        part = slice(start, start + CHUNK + 1)
        ends = pointers[part] + lengths[part].astype(np.int64) * itemsize
        if (pointers[part][1:] < ends[:-1]).any():
            return False
    return True
