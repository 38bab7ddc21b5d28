"""Public tensors that repeat a parameter, such as a head beside a tied embedding. They are equal, or are refused."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from mplug.errors import UsageError
from mplug.layout.placement import Box
from mplug_pretrained.external import Link
from mplug_pretrained.published import FolderWeights
from mplug_pretrained.transfer import Read, fill_ours

COMPARED = 1 << 22
"""The maximum number of elements that are compared at a time: 16 MiB in fp32."""
Slab = tuple[tuple[int, ...], tuple[int, ...]]
"""The start and the shape of a part of a tensor."""


def differing_copy(
    links: Sequence[Link], copies: Iterable[Link], read: Read, slab: Slab, dtype: torch.dtype
) -> Link | None:
    """The first copy whose values differ from those of the parameter in a box (start, shape); None if all are equal.

    `links` are those of the parameter. Values are compared in `dtype`.
    """
    for copy in copies:
        for start, shape in _slabs(*slab):
            ours = torch.zeros(shape, dtype=dtype)
            fill_ours(links, start, ours, read)
            theirs = ours.clone()  # the copy may be of a part of the parameter
            fill_ours((copy,), start, theirs, read)
            if not torch.equal(ours, theirs):
                return copy
    return None


def refuse_other_copies(label: str, weights: FolderWeights, name: str, copies: Sequence[Link], box: Box) -> None:
    """Raise UsageError unless a box of a parameter has the same values in the copies; `label` names the folder."""
    links = weights.links[name]
    copy = differing_copy(links, copies, weights.read, (box.start, box.shape), weights.widest)
    if copy is not None:
        raise UsageError(
            f"{label}: '{copy.public(0)}' and '{links[0].public(0)}' have different values, but its model has one "
            f"parameter ('{name}') for both; use a folder in which they are equal, or leave out the first one by "
            f"checkpoint.pretrained.except"
        )


def _slabs(start: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Slab]:
    """Parts of a box along its first dimension."""
    rows = max(COMPARED // max(prod(shape[1:]), 1), 1)
    for first in range(0, shape[0], rows):
        length = min(rows, shape[0] - first)
        yield (start[0] + first, *start[1:]), (length, *shape[1:])
