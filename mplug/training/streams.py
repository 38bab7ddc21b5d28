"""The rows of streams in a micro batch: checked, counted, and padded so that the ranks of a layout divide them.

P rows, N segments, G rows of a group. `mplug.Stream` describes the entries.
"""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import torch

from mplug.contracts import MicroBatch
from mplug.layout.plan import TOKENS_AXIS

if TYPE_CHECKING:
    from mplug.layout.mesh import Mesh
    from mplug.layout.plan import Plan, Stream


def malformed_streams(batch: MicroBatch, plan: "Plan") -> str:
    """A sentence about entries of streams that contradict one another; '' if there are none."""
    for axis, stream in plan.streams.items():
        rows = _rows_by_entry(batch, plan, axis)
        if not rows:
            continue
        first, number = next(iter(rows.items()))
        for name, own in rows.items():
            if own != number:
                return f"'{name}' has {own} rows of {axis}, and '{first}' has {number}"
        if number == 0 or number % stream.group:
            return f"'{first}' has {number} rows of {axis}; the number must be a multiple of {stream.group}, and not 0"
        for name in (name for name in stream.lengths if name in batch):
            lengths = batch[name]
            if lengths.dtype != torch.int64 or lengths.dim() != 2 or len(lengths) != 1:
                return f"'{name}' {tuple(lengths.shape)} of {lengths.dtype} must be [1, N] of int64"
            if bool((lengths < 0).any()) or int(lengths.sum()) != number:
                return f"'{name}' sums to {int(lengths.sum())}; it must have the lengths of segments of {number} {axis}"
    return ""


def count_rows(batch: MicroBatch, plan: "Plan") -> dict[str, tuple[int, int]]:
    """(rows, sum of the squared lengths of segments) of a whole micro batch, by the entry with the lengths."""
    entries = [name for stream in plan.streams.values() for name in stream.lengths if name in batch]
    return {name: (int(batch[name].sum()), int(batch[name].square().sum())) for name in entries}


def divisible(batch: MicroBatch, plan: "Plan", mesh: "Mesh") -> MicroBatch:
    """A whole micro batch whose streams have a number of groups of rows that the ranks of the layout divide.

    The added rows are copies of the last group. They are segments of their own, to which nothing in the micro batch
    refers, so their results and gradients are zeros.
    """
    ranks = prod(axis.size for axis in mesh.views["dense"] if TOKENS_AXIS in axis.activations)
    padded = dict(batch)
    for axis, stream in plan.streams.items():
        rows = _rows_by_entry(batch, plan, axis)
        if rows:
            missing = -(next(iter(rows.values())) // stream.group) % ranks
            padded |= _with_groups(batch, plan, axis, stream, missing)
    return padded


def _with_groups(batch: MicroBatch, plan: "Plan", axis: str, stream: "Stream", number: int) -> MicroBatch:
    """The entries of a stream with `number` more groups; each is a segment."""
    if not number:
        return {}
    made = {}
    for name in _rows_by_entry(batch, plan, axis):
        dim = plan.context[name].index(axis)
        last = batch[name].narrow(dim, batch[name].shape[dim] - stream.group, stream.group)
        made[name] = torch.cat((batch[name], *[last] * number), dim)
    for name in (name for name in stream.lengths if name in batch):
        made[name] = torch.cat((batch[name], batch[name].new_full((1, number), stream.group)), dim=1)
    return made


def _rows_by_entry(batch: MicroBatch, plan: "Plan", axis: str) -> Mapping[str, int]:
    named = {name: axes for name, axes in plan.context.items() if name in batch and axis in axes}
    return {name: batch[name].shape[axes.index(axis)] for name, axes in named.items()}
