"""The part of a local tensor that holds a box."""

from torch import Tensor

from mplug.layout.ownership import FlatBox
from mplug.layout.placement import Box


def region(local: Tensor, box: Box) -> Tensor:
    """The view of a rank's local tensor that holds a box."""
    if isinstance(box, FlatBox):
        return local.as_strided(box.shape, box.strides, local.storage_offset() + box.offset[0])
    return local[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
