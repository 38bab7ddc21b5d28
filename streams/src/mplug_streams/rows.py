"""The rows of streams in a micro batch: checked, counted, and divided among the ranks of a layout.

`mplug.Stream` describes the entries.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from mplug.contracts.micro_batch import MicroBatch
from mplug.layout.plan import TOKENS_AXIS
from mplug.training.batch_parts import rows_by_entry
from mplug_streams.segment_shares import assigned

if TYPE_CHECKING:
    from mplug.layout.mesh import Mesh
    from mplug.layout.plan import Plan, Stream


def malformed_streams(batch: MicroBatch, plan: "Plan") -> str:
    """A sentence about entries of streams that contradict one another; '' if there are none."""
    for axis, stream in plan.streams.items():
        rows = rows_by_entry(batch, plan, axis)
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
            if fault := _nesting_fault(name, lengths, batch[stream.lengths[0]], stream.group):
                return fault
    return ""


def _nesting_fault(name: str, lengths: Tensor, outer: Tensor, group: int) -> str:
    """A sentence if segments cut groups of rows, or if they are not within the outer ones; '' if they are sound."""
    ends = set(lengths.cumsum(dim=1)[0].tolist())
    if any(end % group for end in ends):
        return f"'{name}' has a segment whose length is no multiple of {group}"
    if not ends.issuperset(outer.cumsum(dim=1)[0].tolist()):
        return f"'{name}' has a segment that crosses the end of a segment of the first lengths of the stream"
    return ""


def count_rows(batch: MicroBatch, plan: "Plan") -> dict[str, tuple[int, int]]:
    """(rows, sum of the squared lengths of segments) of a whole micro batch, by the entry with the lengths."""
    entries = [name for stream in plan.streams.values() for name in stream.lengths if name in batch]
    return {name: (int(batch[name].sum()), int(batch[name].square().sum())) for name in entries}


def own_rows(batch: MicroBatch, plan: "Plan", mesh: "Mesh", rank: int) -> MicroBatch:
    """A whole micro batch with the rows of streams that `rank` computes, and with the numbers that groups then have."""
    sharing = [axis for axis in mesh.views["dense"] if axis.shares_streams and axis.size > 1]
    own = mesh.number(rank, [axis.name for axis in sharing]) if sharing else 0
    splits = prod(axis.size for axis in mesh.views["dense"] if TOKENS_AXIS in axis.activations)
    changed = dict(batch)
    for axis, stream in plan.streams.items():
        if rows_by_entry(batch, plan, axis):
            changed |= _Shares(batch, plan, axis, stream, prod(one.size for one in sharing), splits).of(own)
            changed |= {name: _padded(changed[name]) for name in stream.lengths if name in changed}
            groups = next(iter(rows_by_entry(changed, plan, axis).values())) // stream.group
            sources = zip(stream.own, stream.indices, strict=False)
            changed |= {name: _own_lines(changed[of], own, groups) for name, of in sources if of in changed}
    return changed


def _own_lines(numbers: Tensor, share: int, groups: int) -> Tensor:
    """The lines of `Stream.own`: numbers [B, L] of all shares, each of which has so many groups."""
    first = numbers[:, 0]
    lines = numbers[(first >= share * groups) & (first < (share + 1) * groups)]
    lines = lines if len(lines) else torch.full_like(numbers[:1], -1)
    return torch.where(lines < 0, lines, lines - share * groups)


def _padded(lengths: Tensor) -> Tensor:
    """Lengths with at least two entries: a compiler compiles a unit once more for a dimension of size 1."""
    return lengths if lengths.shape[1] > 1 else pad(lengths, (0, 1))


class _Shares:
    """The rows of a stream, divided among ranks: whole segments, with about equally many rows for each rank."""

    def __init__(self, batch: MicroBatch, plan: "Plan", axis: str, stream: "Stream", number: int, splits: int) -> None:
        self.batch, self.plan, self.axis, self.stream = batch, plan, axis, stream
        self.lengths = lengths_in(batch, stream.lengths[0])
        self.segments = [[place.number for place in own] for own in assigned([self.lengths], number)]
        most = max(sum(self.lengths[one] for one in own) for own in self.segments) // stream.group
        self.groups = max(2, -(-most // splits)) * splits  # a compiler compiles once more for a single row

    def of(self, share: int) -> dict[str, Tensor]:
        """The entries of the stream for a share."""
        segments, group = self.segments[share], self.stream.group
        missing = self.groups - sum(self.lengths[one] for one in segments) // group
        if len(self.segments) == 1 and not missing:
            return {}
        starts = [0, *accumulate(self.lengths)]
        parts = [torch.arange(starts[one], starts[one + 1]) for one in segments]
        chosen = torch.cat((*parts, *[torch.arange(starts[-1] - group, starts[-1])] * missing))
        made = dict[str, Tensor]()
        for name in rows_by_entry(self.batch, self.plan, self.axis):
            made[name] = self.batch[name].index_select(self.plan.context[name].index(self.axis), chosen)
        for name in (name for name in self.stream.lengths if name in self.batch):
            within = lengths_within(self.lengths, lengths_in(self.batch, name))
            own = [length for one in segments for length in within[one]] + [group] * missing
            made[name] = self.batch[name].new_tensor([own])
        return made | self._renumbered()

    def _renumbered(self) -> dict[str, Tensor]:
        """The entries with numbers of groups; a group keeps its number if there is one share."""
        if len(self.segments) == 1:
            return {}
        starts = [start // self.stream.group for start in (0, *accumulate(self.lengths))]
        numbers = torch.empty(starts[-1], dtype=torch.int64)
        for share, segments in enumerate(self.segments):
            first = share * self.groups
            for one in segments:
                count = starts[one + 1] - starts[one]
                numbers[starts[one] : starts[one + 1]] = torch.arange(first, first + count)
                first += count
        made = dict[str, Tensor]()
        for name in (name for name in self.stream.indices if name in self.batch):
            old = self.batch[name]
            made[name] = torch.where(old < 0, old, numbers[old.clamp(min=0)])
        return made


def lengths_in(batch: MicroBatch, name: str) -> list[int]:
    """The lengths that an entry of a micro batch states, without padding."""
    return [length for length in batch[name][0].tolist() if length]


def lengths_within(outer: Sequence[int], inner: Sequence[int]) -> list[list[int]]:
    """The lengths `inner` of the parts of each segment; the segments have the lengths `outer`."""
    unread, found = iter(inner), list[list[int]]()
    for length in outer:
        found.append([])
        while sum(found[-1]) < length:
            found[-1].append(next(unread))
    return found
