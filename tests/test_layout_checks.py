"""What the suites compare: placements that do not cover a parameter, and weights that are not those of one process."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mplug import Axis, Box, IndexMap, Init, Mesh, Parameter, Placement, UsageError, contiguous
from mplug_testing import Fault
from mplug_testing.harness import Trace, weights_off
from mplug_testing.layouts import require_exact_cover, require_partition

Change = Callable[[int, Box], tuple[Box, ...]]


class Changed(Placement):
    """A placement of [8, 6] over two ranks of tp and two of dp, with boxes that somebody has got wrong."""

    change: Change

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return tuple(new for box in super().boxes(rank) for new in type(self).change(rank, box))


def placement(change: Change) -> Placement:
    mesh = Mesh.of([Axis("tp", 2, splits=("mlp",)), Axis("dp", 2, entries={"batch": contiguous}, distance=1)], 4)
    kind = type("Changed", (Changed,), {"change": staticmethod(change)})
    return kind("w", Parameter(("mlp", "embed"), Init("normal", 1.0)), (8, 6), mesh)


def test_a_placement_as_the_host_computes_it_covers_its_parameter() -> None:
    require_exact_cover(placement(lambda _, box: (box,)))


CLAIMS_HELD = r"rank {} states that a box of 'w' is held by ranks {}; it is held by ranks {}"
CLAIMS_SUM = r"rank 0 states that a box of 'w' is partial over ranks {}, and these ranks state otherwise"
WRONG_BOXES: dict[str, tuple[Change, str]] = {
    "a column is left out": (lambda _, box: (replace(box, shape=(4, 5)),), "element [0, 5] of 'w' is in no box"),
    "a row is held twice": (
        lambda _, box: (box, replace(box, shape=(1, 6))),
        "element [0, 0] of 'w' is in 2 different boxes",
    ),
    "a copy that is not there": (lambda rank, box: (box,) if rank else (), CLAIMS_HELD.format(2, (0, 2), (2,))),
    "copies that do not know each other": (
        lambda rank, box: (replace(box, copies=(rank,)),),
        CLAIMS_HELD.format(0, (0,), (0, 2)),
    ),
    "sums over others' ranks": (lambda rank, box: (replace(box, partial=(rank, 3)),), CLAIMS_SUM.format((0, 3))),
    "one-sided sums": (
        lambda rank, box: (replace(box, partial=(rank,)) if rank == 2 else box,),
        CLAIMS_SUM.format((0, 2)),
    ),
    "a box beyond the local tensor": (
        lambda _, box: (replace(box, offset=(1, 0)),),
        "rank 0 holds a box of shape (4, 6) of 'w' at offset (1, 0), which exceeds its tensor of shape (4, 6)",
    ),
}


@pytest.mark.parametrize(("change", "said"), WRONG_BOXES.values(), ids=WRONG_BOXES)
def test_a_placement_that_leaves_out_repeats_or_miscounts_is_named(change: Change, said: str) -> None:
    with pytest.raises(Fault, match=re.escape(said)):
        require_exact_cover(placement(change))


def refusing(length: int, size: int, index: int) -> tuple[range, ...]:
    raise UsageError("never")


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda length, size, index: (range(index, length, size + 1),), "assigns index 2 of 4 to 0 of 2 ranks"),
        (lambda length, *_: (range(length),), "assigns index 0 of 2 to 2 of 2 ranks"),
        (lambda length, size, index: (range(index, length + 2, size),), "assigns index 2 of 2 to 1 of 2 ranks"),
        (lambda length, size, _: (range(length // (size - 2)),), "raises ZeroDivisionError"),
        (refusing, "refuses all the lengths 2, 4, 8 and 5"),
    ],
    ids=["gaps", "everything", "beyond", "crashing", "refusing"],
)
def test_an_index_map_that_is_no_partition_is_named(cut: IndexMap, said: str) -> None:
    with pytest.raises(Fault, match=said):
        require_partition(Axis("cp", 2, entries={"sequence": cut}))


def trace(first: list[float], last: list[float]) -> Trace:
    found = Trace(shapes={"w": (2,)})
    found.initial, found.weights = ({"w": [((0,), torch.tensor(one, dtype=torch.float64))]} for one in (first, last))
    return found


ONE_PROCESS = trace([1.0, 2.0], [1.1, 2.1])


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ([1.0, 2.0], [1.1, 2.1], ""),
        ([1.0, 2.0], [1.1, 2.1 + 5e-8], ""),
        ([1.0, 2.0000002], [1.1, 2.1], "the initial values of 'w' are not those of one process"),
        ([1.0], [1.1], "the initial values of 'w' are not those of one process"),  # no rank owns the second
        ([1.0, 2.0], [1.1, 2.1 + 5e-7], "'w' has an error of 5"),
        ([1.0, 2.0], [1.1, float("nan")], "'w' has an error of nan"),
    ],
)
def test_weights_are_compared_by_how_far_they_have_moved(first: list[float], last: list[float], said: str) -> None:
    found = weights_off([trace(first, last)], ONE_PROCESS)
    assert found.startswith(said)
    assert bool(found) == bool(said)
