"""A zero-bubble schedule within a memory limit."""

from functools import cache

from mplug_pp.schedules import alternating, delaying, halves, loop, passes, refuse
from mplug_schedules import Shape, Table, with_transfers


@cache
def zb_limited(shape: Shape) -> Table:
    """The schedules between ZB-H1 and ZB-H2 (arXiv 2401.10241, section 3): memory beyond p micro batches ends bubbles.

    No rank holds activations of more than `limit` micro batches. With limit p (the default and the peak of 1F1B), it is
    ZB-H1, and with 2p - 1, ZB-H2. With less than p, the ranks wait for each other. All memory is used: rank r runs as
    many forwards ahead as help, and delays as many weight gradients as still fit.
    """
    refuse(shape, "zb-limited", 1, limit=True)
    p, limit = shape.num_ranks, int(shape.num_ranks if shape.limit is None else shape.limit)
    if limit < 1:
        raise ValueError(f"the schedule 'zb-limited' needs a limit of 1 micro batch or more, not {shape.limit:g}")
    rows = []
    for rank in range(p):
        forwards, backwards = passes(rank, shape, 1, [shape.num_micro_batches])
        below = p - 1 - rank
        warmup = min(below + min(limit - p, below) if limit > p else min(below, limit - 1), len(forwards))
        mixed = alternating(forwards[warmup:], halves(backwards))
        rows.append((*forwards[:warmup], *delaying(mixed, delay=limit - 1 - warmup)))
    return with_transfers(tuple(rows), loop(p, 1))
