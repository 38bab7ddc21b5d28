"""Placements whose rows are divided at rest: pure data, exact for every shape and whatever divides beside them."""

import math
from dataclasses import replace

import pytest
import torch

from mplug import Axis, Box, Init, Mesh, Parameter, Placement, Segment, UsageError, contiguous
from mplug_sharding import GatheredPlacement
from mplug_testing.layouts import require_exact_cover
from mplug_testing.suite import Fault

ROWS = Axis("rows", 4, entries={"batch": contiguous}, distance=15)
COPIES = Axis("copies", 2, entries={"batch": contiguous}, distance=20)
TENSOR = Axis("tensor", 2, splits=("heads", "kv_heads", "mlp", "vocab"), activations=("sequence",))
STAGES = Axis("stages", 2, activations=("units",), distance=100)


def placed(dims: tuple, shape: tuple[int, ...], *axes: Axis, over: tuple[str, ...] = ("batch",)) -> Placement:
    mesh = Mesh.of([ROWS, *axes], math.prod(axis.size for axis in (ROWS, *axes)))
    parameter = Parameter(dims, Init("constant"), over)
    return Placement("one", parameter, shape, mesh)


FUSED = ((Segment("heads", 4, 3), Segment("kv_heads", 1, 3, "copy"), Segment("kv_heads", 1, 3, "copy")), "embed")
SHAPES: dict[str, Placement] = {
    "a vector": placed(("embed",), (10,)),
    "fewer rows than ranks": placed(("embed",), (3,)),
    "one row": placed(("embed", "mlp"), (1, 8)),
    "a matrix": placed(("mlp", "embed"), (24, 6), TENSOR),
    "cut along the other dimension": placed(("embed", "mlp"), (7, 8), TENSOR),
    "fused, with copies of KV heads": placed(FUSED, (18, 5), TENSOR, COPIES),
    "a padded vocabulary": placed((Segment("vocab", 13, 1, "pad"), "embed"), (13, 4), TENSOR),
    "broadcast over a divided sequence": placed(("embed",), (9,), TENSOR, COPIES, over=("batch", "sequence")),
    "on two stages": replace(
        placed(("vocab", "embed"), (16, 2), STAGES, TENSOR, over=("batch", "units")), stage_axis="stages", stages=(0, 1)
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_hold_the_rows_that_torch_cuts_and_sum_over_all_other_axes(name: str) -> None:
    whole = SHAPES[name]
    gathered = GatheredPlacement.of(whole, "rows")
    require_exact_cover(gathered)
    assert set(gathered.partial_axes) == set(whole.partial_axes) - {"rows"}
    assert set(gathered.data_axes) == set(whole.data_axes) - {"rows"}
    for rank in whole.holders:
        shape, index = whole.local_shape(rank), whole.mesh.index(rank, "rows")
        chunks = torch.arange(math.prod(shape)).view(shape).chunk(4)
        rows = chunks[index] if index < len(chunks) else torch.empty(0, *shape[1:])
        assert (gathered.local_shape(rank), gathered.gathered_shape(rank)) == (tuple(rows.shape), shape)
        for box in gathered.boxes(rank):
            (around,) = (one for one in whole.boxes(rank) if contains(one, box))
            assert [*box.partial] == [r for r in around.partial if whole.mesh.index(r, "rows") == index]


def contains(outer: Box, inner: Box) -> bool:
    sides = zip(outer.start, outer.shape, inner.start, inner.shape, strict=True)
    return all(start <= other and other + length <= start + size for start, size, other, length in sides)


def test_axes_that_gather_nothing_or_rows_that_another_axis_divides_are_refused() -> None:
    with pytest.raises(AssertionError, match="not partial over axis 'rows'"):
        GatheredPlacement.of(placed(("embed",), (8,), over=("sequence",)), "rows")
    gathered = GatheredPlacement.of(placed(("embed",), (8,), COPIES), "rows")
    with pytest.raises(UsageError, match="axes 'rows' and 'copies' both divide the rows of 'one'"):
        GatheredPlacement.of(gathered, "copies")


def test_the_check_catches_rows_that_two_ranks_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatheredPlacement, "_rows", lambda *_: range(3))
    with pytest.raises(Fault, match=r"states that a box of 'one' is held by ranks"):
        require_exact_cover(GatheredPlacement.of(SHAPES["a vector"], "rows"))


def test_a_parameter_that_changes_its_meaning_stays_gathered() -> None:
    gathered = GatheredPlacement.of(SHAPES["a vector"], "rows", in_host_memory=True)
    again = replace(gathered, parameter=replace(gathered.parameter, over=("batch", "sequence")))
    assert (again.gathered_along, again.offloaded) == ("rows", True)
    assert (SHAPES["a vector"].gathered_along, SHAPES["a vector"].offloaded) == (None, False)
