"""Durations of calls by the device's clock."""

from collections.abc import Callable
from itertools import pairwise

from mplug.training.hardware import Moment


def timed(work: Callable[[], object], repeats: int, device: str) -> list[float]:
    """Seconds of each of `repeats` consecutive calls, by the device's clock; it waits once, after the last call."""
    moments = [Moment(device)]
    for _ in range(repeats):
        work()
        moments.append(Moment(device))
    moments[-1].wait()
    return [after.since(before) for before, after in pairwise(moments)]
