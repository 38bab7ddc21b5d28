"""The part of a micro batch that a rank computes with, and micro batches that are as many on every rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug.contracts import MicroBatch
from mplug.nn.loss import IGNORED

if TYPE_CHECKING:
    from mplug.mesh import Mesh
    from mplug.run import Run


def own_entries(batch: MicroBatch, context: Mapping[str, tuple[str, ...]], mesh: "Mesh", rank: int) -> MicroBatch:
    """The part of each entry that `rank` has, cut along every axis but the samples', which the loader has divided.

    `context` names the axes of the entries. Mesh axes that divide the same one act one after the other, the slowest
    first.
    """
    own = dict(batch)
    for name in own.keys() & context.keys():
        for dim, named in enumerate(context[name]):
            for axis in mesh.views["attention"]:
                if named != "batch" and named in axis.entries:
                    length, index = own[name].shape[dim], mesh.index(rank, axis.name)
                    own[name] = _joined(own[name], dim, axis.entries[named](length, axis.size, index))
    return own


def _joined(x: Tensor, dim: int, ranges: tuple[range, ...]) -> Tensor:
    before = (slice(None),) * dim
    return torch.cat([x[(*before, slice(part.start, part.stop, part.step))] for part in ranges], dim)


def even_parts(take: Callable[[int], Iterable[MicroBatch]], num_samples: int, run: "Run") -> Iterator[MicroBatch]:
    """This rank's part of `num_samples` samples, in micro batches that are as many and as large on every rank.

    Ranks that meet inside a unit, whose experts take each other's tokens, must all come. Where ranks do not divide the
    samples, a few more are read than are wanted, and these have no targets.
    """
    index, shards = run.mesh.batch_shard(run.rank)
    each = -(-num_samples // shards)
    wanted = num_samples - index * each
    for batch in take(each * shards):
        size = len(batch["sample_ids"])
        yield batch if size <= wanted else _without_targets_from(max(wanted, 0), batch)
        wanted -= size


def _without_targets_from(row: int, batch: MicroBatch) -> MicroBatch:
    labels = batch["labels"].clone()
    labels[row:] = IGNORED
    return {**batch, "labels": labels}
