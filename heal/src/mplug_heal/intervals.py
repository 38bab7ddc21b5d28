"""How often a run should save: the interval that loses the least time. Times are in seconds. Torch-free.

`stall` is the time for which a save stops training, `mean` the mean time between two failures. The formulas are those
of Young (Communications of the ACM 17(9), 1974) and of Daly (Future Generation Computer Systems 22(3), 2006).
"""

from math import sqrt

GPU_HOURS_BETWEEN_FAILURES = 50_700.0
"""Of Llama 3 405B: 419 unexpected interruptions of 16,384 H100s in 54 days (arXiv 2407.21783)."""


def best_interval(stall: float, mean: float) -> float:
    """The training time between two saves (Daly); the mean time itself if a save takes more than twice as long."""
    if stall >= 2 * mean:
        return mean
    ratio = stall / (2 * mean)
    return sqrt(2 * stall * mean) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall


def lost_share(stall: float, interval: float, mean: float) -> float:
    """The share of the time that saves and repeated steps take (Young), without the restarts."""
    return stall / interval + interval / (2 * mean)
