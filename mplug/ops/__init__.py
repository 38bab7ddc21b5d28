"""What strategies share: differentiable collectives, each stated once with its dual."""

from mplug.ops.collectives import (
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    copy,
    exchange,
    gather,
    join,
    own_part,
    reduce,
    reduce_scatter,
    scatter,
    split,
)

__all__ = [
    "Group",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy",
    "exchange",
    "gather",
    "join",
    "own_part",
    "reduce",
    "reduce_scatter",
    "scatter",
    "split",
]
