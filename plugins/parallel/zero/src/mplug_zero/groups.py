"""The process groups of buckets."""

from collections.abc import Mapping
from typing import NamedTuple

from mplug import Bucket, Model, Run, ops
from mplug_zero.layout import owning_axes

Axes = tuple[str, ...]


class Pair(NamedTuple):
    """Who shares a bucket, each owning a part of it, and who has copies of such a part; None where a rank is alone."""

    owners: ops.Group
    copies: ops.Group


def groups_of(run: Run, model: Model) -> dict[tuple[Axes, Axes], Pair]:
    """The groups of every (`axes`, `copied`) that a bucket of any rank may have: made by all ranks together."""
    trained = [placement for placement in model.placements.values() if placement.parameter.trainable]
    families = dict.fromkeys(axes for placement in trained if (axes := owning_axes(run.mesh, placement)) is not None)
    return {(own, copied): Pair(run.group(*own), run.group(*copied)) for own, copied in families}


def group_of(groups: Mapping[tuple[Axes, Axes], Pair], bucket: Bucket) -> Pair:
    """The groups of a bucket."""
    return groups[bucket.axes, bucket.copied]
