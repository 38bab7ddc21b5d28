"""What the feed makes of a loader's micro batch: derived entries, counts, and the part of a rank."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug.contracts.micro_batch import DOCUMENTS, IGNORED, SEQUENCES, MicroBatch
from mplug.layout.mesh import DocumentMap
from mplug.tensors.segments import numbered
from mplug.training.division import division

if TYPE_CHECKING:
    from mplug.layout.mesh import Mesh
    from mplug.layout.plan import Plan


def own_part(batch: MicroBatch, plan: "Plan", mesh: "Mesh", rank: int) -> MicroBatch:
    """The part of a whole micro batch that `rank` computes, with the entries that the plan makes from others."""
    whole = with_shifted(batch, plan)
    own = division().own_rows(whole, plan, mesh, rank) if plan.streams else whole
    return own_entries(own, plan.context, mesh, rank)


def own_entries(batch: MicroBatch, context: Mapping[str, tuple[str, ...]], mesh: "Mesh", rank: int) -> MicroBatch:
    """The part of each entry that `rank` has, cut along every named axis except `batch`, which the loader divides.

    `context` names the axes of the entries. If several mesh axes divide the same named axis, they cut it in order, the
    slowest first. A `DocumentMap` cuts whole samples, so its axis is the slowest of those.
    """
    own = dict(batch)
    for name in own.keys() & context.keys():
        for dim, named in enumerate(context[name]):
            for axis in mesh.views["dense"]:
                if named != "batch" and named in axis.entries:
                    length, index, cut = own[name].shape[dim], mesh.index(rank, axis.name), axis.entries[named]
                    if isinstance(cut, DocumentMap) and DOCUMENTS in batch:
                        dims = context[name].index("batch"), dim
                        own[name] = division().own_documents(own[name], dims, batch, cut, axis.size, index)
                    else:
                        own[name] = _joined(own[name], dim, cut(length, axis.size, index))
    return own


def with_shifted(batch: MicroBatch, plan: "Plan") -> MicroBatch:
    """A whole micro batch with the entries that the plan makes from others (`Plan.shifted`)."""
    if not plan.shifted:
        return batch
    made = {}
    for name, shift in plan.shifted.items():
        if shift.entry not in batch:
            continue  # an optional one
        dim, x = plan.context[shift.entry].index("sequence"), batch[shift.entry]
        if x.shape[dim] <= shift.by:
            made[name] = torch.full_like(x, shift.fill)
            continue
        moved, kept = x.narrow(dim, shift.by, x.shape[dim] - shift.by), x.shape[dim] - shift.by
        if DOCUMENTS in batch:
            number = numbered(batch[DOCUMENTS], x.shape[dim])  # [B, S], as all entries with documents
            moved = moved.masked_fill(number[:, shift.by :] != number[:, :kept], shift.fill)
        made[name] = torch.cat((moved, torch.full_like(x.narrow(dim, 0, shift.by), shift.fill)), dim)
    return {**batch, **made}


def _joined(x: Tensor, dim: int, ranges: tuple[range, ...]) -> Tensor:
    before = (slice(None),) * dim
    return torch.cat([x[(*before, slice(part.start, part.stop, part.step))] for part in ranges], dim)


def rows_by_entry(batch: MicroBatch, plan: "Plan", axis: str) -> Mapping[str, int]:
    """The entries of a micro batch that have rows of a stream, and their numbers of rows."""
    named = {name: axes for name, axes in plan.context.items() if name in batch and axis in axes}
    return {name: batch[name].shape[axes.index(axis)] for name, axes in named.items()}


def count_targets(batch: MicroBatch, plan: "Plan | None" = None) -> "tuple[int, int | Tensor | None]":
    """(positions, targets) of a whole micro batch; (0, None) without labels. A plan may count otherwise (`Plan.count`).

    The number of targets is a tensor if the labels are on a device, because the CPU would wait for the device.
    """
    if "labels" not in batch:
        return 0, None
    labels = batch["labels"]
    targets = (labels != IGNORED).sum() if plan is None or plan.count is None else plan.count(batch)
    return labels.numel(), int(targets) if labels.device.type == "cpu" else targets


def without_extra_targets(batches: Iterable[MicroBatch], num_samples: int) -> Iterator[MicroBatch]:
    """The micro batches; those after the first `num_samples` samples have no targets, and no sequences to score."""
    for batch in batches:
        size = len(batch["sample_ids"])
        yield batch if size <= num_samples else _without_targets_from(max(num_samples, 0), batch)
        num_samples -= size


def _without_targets_from(row: int, batch: MicroBatch) -> MicroBatch:
    counted = {name: batch[name].clone() for name in ("labels", SEQUENCES) if name in batch}
    for name, entry in counted.items():
        entry[row:] = IGNORED if name == "labels" else -1
    return {**batch, **counted}
