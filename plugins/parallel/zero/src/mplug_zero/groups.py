"""The process groups of buckets."""

from collections.abc import Mapping
from typing import NamedTuple

import mplug_ops as ops
from mplug import Bucket, Model, Run
from mplug_sharding import Shard
from mplug_zero.config import Over
from mplug_zero.layout import owning_axes

Axes = tuple[str, ...]


class Pair(NamedTuple):
    """The two groups of a bucket, each None if it has one rank.

    `owners` are the ranks that each own a part of the bucket. `copies` are the ranks with copies of this rank's part.
    """

    owners: ops.Group
    copies: ops.Group


def groups_of(run: Run, model: Model, over: Over) -> dict[tuple[Axes, Axes], Pair]:
    """(`Bucket.axes`, `Bucket.copied`) -> groups, for the buckets of all ranks.

    Creating groups is collective, so all ranks call this together.
    """
    trained = [placement for placement in model.placements.values() if placement.parameter.trainable]
    found = (owning_axes(run.mesh, placement, over) for placement in trained)
    families = dict.fromkeys(axes for axes in found if axes is not None)
    return {(own, copied): Pair(run.group(*own), run.group(*copied)) for own, copied in families}


def group_of(groups: Mapping[tuple[Axes, Axes], Pair], bucket: Bucket) -> Pair:
    """The groups of a bucket."""
    return groups[bucket.axes, bucket.copied]


def exchange_of(what: str, shard: Shard, group: ops.Group) -> ops.Exchange:
    """The exchange of a whole bucket."""
    bucket = shard.bucket
    parts = zip(bucket.names, bucket.sizes, bucket.starts, strict=True)
    return ops.Exchange(what, group, (ops.Item(name, (size,), (start,)) for name, size, start in parts))
