"""What ranks exchange when they save and open checkpoints: three ranks, and the values that each must get."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from mplug import RunError, UsageError
from mplug.distributed.groups import Groups
from mplug.run.run import Run
from mplug_saving.rank_exchanges import at_first, divided, from_rank, raise_alike
from mplug_testing import run_workers

Values = tuple[list[str], list[str], str]


def run_of_rank() -> Run:
    rank, size = dist.get_rank(), dist.get_world_size()
    return cast(Run, SimpleNamespace(rank=rank, groups=Groups(rank), mesh=SimpleNamespace(world_size=size)))


def exchanged() -> Values:
    run = run_of_rank()
    own = f"of {run.rank}"
    parts = [f"for {rank}" for rank in range(3)] if run.rank == 0 else []
    return at_first(run, own), [from_rank(run, rank, own) for rank in range(3)], divided(run, parts)


def test_every_rank_gets_what_is_meant_for_it() -> None:
    all_of_them = ["of 0", "of 1", "of 2"]
    expected = [([all_of_them, [], []][rank], all_of_them, f"for {rank}") for rank in range(3)]
    assert run_workers(3, exchanged) == expected


def test_a_process_without_a_group_gets_its_own_value() -> None:
    run = cast(Run, SimpleNamespace(rank=0, groups=None))
    assert (at_first(run, "own"), from_rank(run, 0, "own"), divided(run, ["own"])) == (["own"], "own", "own")


def raised(errors: list[tuple[type[Exception], str] | None]) -> tuple[str, str]:
    """Be a rank with an error, or with none: the error that is raised on it."""
    run = run_of_rank()
    own = errors[run.rank]
    error: Any = None if own is None else own[0](own[1])
    try:
        raise_alike(run, error)
    except (RunError, UsageError) as found:
        return type(found).__name__, str(found)
    return "", ""


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None, None, None], ("", "")),
        ([None, None, (UsageError, "two")], ("UsageError", "two")),
        ([None, (UsageError, "one"), (UsageError, "two")], ("UsageError", "one")),
        ([(UsageError, "zero"), None, (RunError, "two")], ("RunError", "rank 2: two")),
        ([(RunError, "zero"), (UsageError, "one"), None], ("RunError", "rank 0: zero")),
    ],
)
def test_all_ranks_raise_the_most_important_error_of_the_lowest_rank(errors: Any, expected: tuple[str, str]) -> None:
    assert run_workers(3, raised, errors) == [expected] * 3
