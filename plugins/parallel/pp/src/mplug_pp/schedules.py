"""Pipeline schedules: pure functions from (number of stages, number of micro batches) to a table. Torch-free."""

from collections.abc import Callable
from functools import cache

from mplug_pp.table import Action, Kind, Table, with_transfers


@cache
def gpipe(num_stages: int, num_micro_batches: int) -> Table:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965)."""
    actions = [Action(kind, n) for kind in (Kind.FORWARD, Kind.BACKWARD) for n in range(num_micro_batches)]
    return with_transfers((tuple(actions),) * num_stages)


@cache
def one_f_one_b(num_stages: int, num_micro_batches: int) -> Table:
    """One forward, one backward (PipeDream-Flush, arXiv 2006.09503; arXiv 2104.04473, figure 3).

    Stage s holds the activations of at most `num_stages - s` micro batches.
    """
    return with_transfers(tuple(_one_f_one_b(stage, num_stages, num_micro_batches) for stage in range(num_stages)))


def _one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> tuple[Action, ...]:
    warmup = min(num_stages - stage, num_micro_batches)
    actions = [Action(Kind.FORWARD, number) for number in range(warmup)]
    for number in range(num_micro_batches):
        actions.append(Action(Kind.BACKWARD, number))
        if warmup + number < num_micro_batches:
            actions.append(Action(Kind.FORWARD, warmup + number))
    return tuple(actions)


SCHEDULES: dict[str, Callable[[int, int], Table]] = {"1f1b": one_f_one_b, "gpipe": gpipe}
"""The name in the config -> the schedule."""
