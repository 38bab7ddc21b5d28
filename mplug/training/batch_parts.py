"""Cut a rank's part out of the entries of a micro batch, and give every rank the same number of micro batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug.contracts import DOCUMENTS, IGNORED, MicroBatch
from mplug.tensors.segments import numbered

if TYPE_CHECKING:
    from mplug.layout.mesh import Mesh
    from mplug.layout.plan import Plan
    from mplug.run.run import Run


def own_entries(batch: MicroBatch, context: Mapping[str, tuple[str, ...]], mesh: "Mesh", rank: int) -> MicroBatch:
    """The part of each entry that `rank` has, cut along every named axis except `batch`, which the loader divides.

    `context` names the axes of the entries. If several mesh axes divide the same named axis, they cut it in order, the
    slowest first.
    """
    own = dict(batch)
    for name in own.keys() & context.keys():
        for dim, named in enumerate(context[name]):
            for axis in mesh.views["dense"]:
                if named != "batch" and named in axis.entries:
                    length, index = own[name].shape[dim], mesh.index(rank, axis.name)
                    own[name] = _joined(own[name], dim, axis.entries[named](length, axis.size, index))
    return own


def with_shifted(batch: MicroBatch, plan: "Plan") -> MicroBatch:
    """A whole micro batch with the entries that the plan makes from others (`Plan.shifted`)."""
    if not plan.shifted:
        return batch
    made = {}
    for name, shift in plan.shifted.items():
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


def even_parts(take: Callable[[int], Iterable[MicroBatch]], num_samples: int, run: "Run") -> Iterator[MicroBatch]:
    """This rank's part of `num_samples` samples, in micro batches whose number and sizes are equal on every rank.

    Ranks that communicate inside a unit (by exchanging tokens) must all run the same number of micro batches. If the
    ranks do not divide the samples, a few more samples are read, and the labels of the extra ones are ignored.
    """
    index, shards = run.mesh.batch_shard(run.rank)
    each = -(-num_samples // shards)
    remaining = num_samples - index * each
    for batch in take(each * shards):
        size = len(batch["sample_ids"])
        yield batch if size <= remaining else _without_targets_from(max(remaining, 0), batch)
        remaining -= size


def _without_targets_from(row: int, batch: MicroBatch) -> MicroBatch:
    labels = batch["labels"].clone()
    labels[row:] = IGNORED
    return {**batch, "labels": labels}
