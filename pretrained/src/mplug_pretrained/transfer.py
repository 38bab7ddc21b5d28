"""Copy values between our tensors and public ones, by the links of their regions."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mplug_pretrained.expansion import Target
from mplug_pretrained.external import Link
from mplug_pretrained.moves import Move, View, moves_to_ours, moves_to_theirs

Read = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Reads a box of a tensor: (name, start, shape) -> a tensor of this shape."""


@torch.no_grad()
def fill_ours(links: Iterable[Link], start: tuple[int, ...], box: Tensor, read: Read) -> None:
    """Fill a box of our tensor, which begins at `start`, from public tensors."""
    for link in links:
        for move in moves_to_ours(link, start, tuple(box.shape)):
            _apply(move, box, read)


@torch.no_grad()
def fill_theirs(targets: Iterable[Target], tensor: Tensor, read: Read) -> None:
    """Fill a whole public tensor from ours."""
    for target in targets:
        for move in moves_to_theirs(target.link, target.index):
            _apply(move, tensor, read)


def _apply(move: Move, target: Tensor, read: Read) -> None:
    """Copy the selected elements; `target` is the box that the move's target counts from."""
    for dim, (start, length) in enumerate(zip(move.target.start, move.target.shape, strict=True)):
        target = target.narrow(dim, start, length)
    into = _factored(target, move.target)
    source = _factored(read(move.tensor, move.source.start, move.source.shape), move.source)
    shared = [label for label in move.target.labels if label in move.source.labels]
    into = _only(into, move.target.labels, shared)
    into.copy_(_only(source, move.source.labels, shared))


def _factored(box: Tensor, view: View) -> Tensor:
    """The selected indices of the factors into which the dimensions of a box are split, as a view of `box`."""
    for dim in reversed(range(box.dim())):
        if len(view.sizes[dim]) > 1:
            box = box.unflatten(dim, view.sizes[dim])
    return box[view.slices]


def _only(factors: Tensor, labels: tuple[str, ...], kept: list[str]) -> Tensor:
    """The factors `kept`, in this order; each other factor has one index."""
    order = [labels.index(label) for label in kept]
    others = [place for place in range(len(labels)) if place not in order]
    return factors.permute(*others, *order)[(0,) * len(others)]
