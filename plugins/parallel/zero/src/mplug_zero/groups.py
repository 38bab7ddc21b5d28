"""The process groups of buckets."""

from collections.abc import Mapping
from typing import NamedTuple

from mplug import Bucket, Model, Run, ops

Axes = tuple[str, ...]


class Pair(NamedTuple):
    """Who shares a bucket, each owning a part of it, and who has copies of such a part; None where a rank is alone."""

    owners: ops.Group
    copies: ops.Group


def groups_of(run: Run, model: Model) -> dict[tuple[Axes, Axes], Pair]:
    """The groups of every (`axes`, `copied`) that a bucket of any rank may have: made by all ranks together."""
    assert model.sharding is not None
    families = dict.fromkeys(placement.data_axes for placement in model.placements.values())
    divided = [((("zero",) if "zero" in axes else axes), axes) for axes in families]
    keys = [(own, tuple(axis for axis in axes if axis not in own)) for own, axes in divided]
    return {(own, copied): Pair(run.group(*own), run.group(*copied)) for own, copied in keys}


def group_of(groups: Mapping[tuple[Axes, Axes], Pair], bucket: Bucket) -> Pair:
    """The groups of a bucket."""
    return groups[bucket.axes, bucket.copied]
