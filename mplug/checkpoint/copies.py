"""Public tensors that repeat a parameter, such as a head beside a tied embedding. They are equal, or are refused."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from mplug.checkpoint.published import FolderWeights
from mplug.checkpoint.transfer import fill_ours
from mplug.errors import UsageError
from mplug.layout.external import Link
from mplug.layout.placement import Box

COMPARED = 1 << 22
"""The maximum number of elements that are compared at a time: 16 MiB in fp32."""
Slab = tuple[tuple[int, ...], tuple[int, ...]]


def refuse_other_copies(label: str, weights: FolderWeights, name: str, copies: Sequence[Link], box: Box) -> None:
    """Raise UsageError unless a box of a parameter has the same values in the copies; `label` names the folder."""
    links = weights.links[name]
    for copy in copies:
        if not all(torch.equal(*_both(weights, links, copy, slab)) for slab in _slabs(box)):
            repeated = links[0].public(0)
            raise UsageError(
                f"{label}: '{copy.public(0)}' and '{repeated}' have different values, but its model has one parameter "
                f"('{name}') for both; use a folder in which they are equal, or leave out the first one by "
                f"checkpoint.pretrained.except"
            )


def _both(weights: FolderWeights, links: Sequence[Link], copy: Link, slab: Slab) -> tuple[Tensor, Tensor]:
    """The values of a slab, and those of the copy, in a type that holds both exactly."""
    start, shape = slab
    ours = torch.zeros(shape, dtype=weights.widest)
    fill_ours(links, start, ours, weights.read)
    theirs = ours.clone()  # the copy may be of a part of the parameter
    fill_ours((copy,), start, theirs, weights.read)
    return ours, theirs


def _slabs(box: Box) -> Iterator[Slab]:
    """Parts of a box along its first dimension."""
    rows = max(COMPARED // max(prod(box.shape[1:]), 1), 1)
    for first in range(0, box.shape[0], rows):
        length = min(rows, box.shape[0] - first)
        yield (box.start[0] + first, *box.start[1:]), (length, *box.shape[1:])
