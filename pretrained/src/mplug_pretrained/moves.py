"""What to copy into a box of one tensor from the boxes of another, by a link between the two. Data only."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from mplug.layout.ownership import flat_boxes
from mplug_pretrained.external import Dims, Factor, Link


@dataclass(frozen=True)
class View:
    """A box of a tensor, seen as factors: its dimensions split into `sizes`, of which `slices` are selected.

    `start` and `shape` describe the box. `labels` names the factors in order.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    slices: tuple[slice, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Move:
    """Copy the selected elements of a box of `tensor` to those of a box of the target.

    `target.start` counts from the start of the box that was asked for; `source.start` from that of the source tensor.
    """

    target: View
    tensor: str
    source: View


def moves_to_ours(link: Link, start: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Move]:
    """The moves from public tensors that fill a box of our tensor, as far as the link describes it."""
    for view, ranges in _selected(link.ours.dims, start, shape):
        if link.fan is None:
            yield Move(view, link.theirs.tensor, _source(link.theirs.dims, ranges))
            continue
        place = view.labels.index(link.fan)
        first, step = view.slices[place].start, link.ours.factors[link.fan].step
        low, high = ranges.pop(link.fan)
        for index in range(low, high):
            at = first + (index - low) * step
            slices = (*view.slices[:place], slice(at, at + 1, 1), *view.slices[place + 1 :])
            own = View(view.start, view.shape, view.sizes, slices, view.labels)
            yield Move(own, link.public(index), _source(link.theirs.dims, ranges))


def moves_to_theirs(link: Link, index: int) -> Iterator[Move]:
    """The moves from our tensor that fill the public tensor number `index` of a link, as far as it describes it."""
    for view, ranges in _selected(link.theirs.dims, (0,) * len(link.theirs.dims), link.theirs.shape):
        fixed = {} if link.fan is None else {link.fan: (index, index + 1)}
        yield Move(view, link.ours.tensor, _source(link.ours.dims, ranges | fixed))


def _selected(
    dims: Dims, start: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[View, dict[str, tuple[int, int]]]]:
    """The selected elements in a box: views of its parts, and the range of each factor among the selected indices."""
    pieces = [
        [(box, dim) for box in flat_boxes(tuple(factor.size for factor in dim), low, low + length)]
        for dim, low, length in zip(dims, start, shape, strict=True)
    ]
    for boxes in product(*pieces):
        ranges, slices, labels = dict[str, tuple[int, int]](), list[slice](), list[str]()
        for box, dim in boxes:
            for factor, low, length in zip(dim, box.start, box.shape, strict=True):
                own = _range(factor, low, low + length)
                ranges[factor.label] = own
                slices.append(_slice(factor, own, low))
                labels.append(factor.label)
        if all(low < high for low, high in ranges.values()):
            starts, sizes = tuple(box.offset[0] for box, _ in boxes), tuple(box.shape for box, _ in boxes)
            yield View(starts, tuple(map(prod, sizes)), sizes, tuple(slices), tuple(labels)), ranges


def _range(factor: Factor, low: int, high: int) -> tuple[int, int]:
    """The range of a factor's selected indices that lie between `low` and `high`."""
    first, last = -(-(low - factor.start) // factor.step), -(-(high - factor.start) // factor.step)
    return max(first, 0), min(last, factor.length)


def _slice(factor: Factor, own: tuple[int, int], origin: int) -> slice:
    """The selected indices `own` of a factor, counted from `origin`."""
    first = factor.start + own[0] * factor.step - origin
    return slice(first, first + (own[1] - own[0] - 1) * factor.step + 1, factor.step)


def _source(dims: Dims, ranges: dict[str, tuple[int, int]]) -> View:
    """The smallest box, aligned to factors, that contains the selected indices `ranges`, and its view.

    If a factor has steps, the box also contains the indices between the selected ones. So maps that interleave tensors
    read equal boxes.
    """
    starts, shapes, sizes, slices, labels = [], [], [], [], []
    for dim in dims:
        start, own = 0, list[int]()
        for number, factor in enumerate(dim):
            inner = prod(other.size for other in dim[number + 1 :])
            selected = ranges.get(factor.label, (0, 1))
            low, high = _aligned(factor, selected) if all(size == 1 for size in own) else (0, factor.size)
            start += low * inner
            own.append(high - low)
            slices.append(_slice(factor, selected, low))
            labels.append(factor.label)
        starts.append(start)
        shapes.append(prod(own))
        sizes.append(tuple(own))
    return View(tuple(starts), tuple(shapes), tuple(sizes), tuple(slices), tuple(labels))


def _aligned(factor: Factor, selected: tuple[int, int]) -> tuple[int, int]:
    first = factor.start + selected[0] * factor.step
    last = factor.start + (selected[1] - 1) * factor.step
    return first - first % factor.step, min(last - last % factor.step + factor.step, factor.size)
