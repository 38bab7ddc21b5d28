"""The collectives around a product, for suppliers that do the work of the whole product (`mplug_nn.Boundary`)."""

from torch import Tensor, uint8

from mplug_nn import Boundary
from mplug_ops import Group, all_gather, all_reduce, reduce_scatter

SEQUENCE = 1
"""The dimension of [B, S, D] that sequence parallelism splits."""


def boundary(group: Group, sequence_parallel: bool, chunked: str = "") -> Boundary:
    """The boundary between a rank's part of the residual stream and the operands of split products.

    `chunked` is the name of the chunked collectives of the group, if they overlap with products.
    """

    def whole(part: Tensor) -> Tensor:
        if not sequence_parallel:
            return part
        if part.itemsize == 1:  # not every backend gathers fp8
            return all_gather(part.view(uint8), group, SEQUENCE).view(part.dtype)
        return all_gather(part, group, SEQUENCE)

    def summed(partial: Tensor) -> Tensor:
        if sequence_parallel:
            return reduce_scatter(partial, group, SEQUENCE)
        return all_reduce(partial, group)

    def largest(x: Tensor) -> Tensor:
        return all_reduce(x, group, "MAX")

    return Boundary(whole, summed, largest, chunked)
