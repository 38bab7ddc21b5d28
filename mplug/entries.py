"""The part of a micro batch that a rank computes with."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mplug.contracts import MicroBatch

if TYPE_CHECKING:
    from mplug.mesh import Mesh


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
