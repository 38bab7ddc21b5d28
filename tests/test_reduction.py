"""The host sums every gradient that is still partial, or refuses a strategy whose gradients it cannot sum."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import mplug_ops as ops
from mplug import (
    Axis,
    Bucket,
    Init,
    Mesh,
    Parameter,
    Piece,
    Placement,
    Ranks,
    Run,
    Sharding,
    contiguous,
)
from mplug.layout.ranks import Grouping
from mplug.run.prepare import prepare
from mplug_sharding import GatheredPlacement
from mplug_steps import reduction
from mplug_steps.reduction import Reduction
from mplug_testing import run_workers
from mplug_testing.harness import tiny_config

ROWS = Axis("rows", 2, entries={"batch": contiguous})
COPIES = Axis("copies", 2, entries={"batch": contiguous}, distance=10)
MESH = Mesh.of([ROWS, COPIES], 4)


def weight(name: str) -> Placement:
    return Placement(name, Parameter(("mlp", "embed"), Init("constant"), ("batch",)), (4, 2), MESH)


class NamedGroups:
    """Names process groups, and creates none."""

    def of(self, grouping: Grouping, use: str = "") -> Any:
        return tuple(grouping.of(0))


def sums(placements: list[Placement], pieces: list[Placement], *reduced_over: str) -> list[tuple[Any, int]]:
    """(the ranks, the number of gradients) of every sum of rank 0."""
    run = replace(prepare(tiny_config({})), mesh=MESH, groups=cast(Any, NamedGroups()))
    gradients = [torch.zeros(one.local_shape(0)) for one in pieces]
    made = [Piece(one.name, g, g, None, one.parameter, one) for one, g in zip(pieces, gradients, strict=True)]
    made_sums = Reduction(run, {one.name: one for one in placements}, reduced_over, made).sums
    return [(exchange.group, len(views)) for exchange, views in made_sums]


def test_parameters_that_differ_only_in_who_shards_them_are_all_summed() -> None:
    sharded = GatheredPlacement.of(weight("a"), "rows")
    for placements in ([sharded, weight("b")], [weight("b"), sharded]):
        assert sorted(sums(placements, placements)) == [((0, 1, 2, 3), 1), ((0, 2), 1)]


def owned(length: int = 8, num_owners: int = 2) -> Placement:
    """The parameter whose parts the ranks of `rows` own."""
    return Sharding((Bucket(("a",), (0,), (8,), length, ("rows",), num_owners=num_owners),)).placed(weight("a"))


def test_a_strategy_that_owns_parts_sums_them_and_leaves_the_other_axes_to_the_host() -> None:
    assert sums([weight("a")], [owned()], "rows") == [((0, 2), 1)]
    assert sums([weight("a")], [owned()], "rows", "copies") == []
    assert {tuple(one.copies.of(0)) for one in owned().regions} == {(0, 2)}
    with pytest.raises(ValueError, match=r"'rows' own different parts of 'a', and nothing sums.* sinks.reduced_over"):
        sums([weight("a")], [owned()])


@pytest.mark.parametrize(("length", "num_owners"), [(8, 0), (9, 2)])
def test_a_bucket_whose_owners_get_unequal_parts_is_refused(length: int, num_owners: int) -> None:
    with pytest.raises(ValueError, match=f"the bucket of 'a' has {length} elements.* num_owners={num_owners} does not"):
        owned(length, num_owners)


@pytest.mark.parametrize("num_owners", [1, 4])
def test_a_bucket_has_an_owner_for_every_rank(num_owners: int) -> None:
    with pytest.raises(ValueError, match=f"'a' is for {num_owners} owners, and axes rows have 2 ranks"):
        owned(num_owners=num_owners)


def test_sharding_rows_keeps_what_is_sharded_and_summed_already() -> None:
    sharded = GatheredPlacement.of(replace(weight("a"), apart=("copies",), summed=("copies",)), "rows")
    (box,) = sharded.boxes(0)
    assert (sharded.partial_axes, box.copies) == ((), Ranks(0))


def test_the_axis_of_a_pipeline_must_be_in_the_view_of_every_parameter() -> None:
    stages = Axis("stages", 2, activations=("units",), distance=100)
    experts = Axis("experts", 2, splits=("expert",), views=("sparse",))
    mesh = Mesh.of([stages, experts, ROWS], 4)
    parameter = Parameter(("expert", "embed"), Init("constant"), ("batch",))
    placement = Placement("a", parameter, (4, 2), mesh, stage_axis="stages", stages=(1,))
    with pytest.raises(ValueError, match=r"axis 'stages' must be in every view of the mesh: set Axis\.views"):
        placement.boxes(2)


def test_a_piece_that_contradicts_the_placement_of_its_parameter_is_refused() -> None:
    summed = replace(weight("a"), summed=("rows", "copies"))
    with pytest.raises(ValueError, match=r"partial over 4 ranks from rank 0 on, and no placement of the model states"):
        sums([summed], [weight("a")])


def summed_in_pairs(least: int) -> list[list[float]]:
    """Be one of four ranks in two groups: two gradients after their sum, in place if they have `least` elements."""
    rank = dist.get_rank()
    group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    views = [torch.full((3,), 10.0**rank), torch.full((2,), -(2.0**rank))]
    held = object.__new__(Reduction)
    held.run = cast(Run, SimpleNamespace(device="cpu"))
    items = [ops.Item(name, tuple(view.shape)) for name, view in zip("ab", views, strict=True)]
    held.sums = [(ops.Exchange("gradients", group, items), views)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "IN_PLACE", least)
        held.finish()
    return [view.tolist() for view in views]


@pytest.mark.parametrize("least", [1, 3, 1000], ids=["in place", "one in place", "as one"])
def test_gradients_are_summed_over_the_ranks_of_their_group_alone(least: int) -> None:
    even, odd = [[101.0] * 3, [-5.0] * 2], [[1010.0] * 3, [-10.0] * 2]
    assert run_workers(4, summed_in_pairs, least) == [even, odd, even, odd]


@pytest.mark.parametrize(
    ("layout", "data", "listens"),
    [
        ("cp2", "dp", True),
        ("tp2cp2", "dp", True),
        ("cp2", None, False),
        ("tp2", "dp", False),
        ("zero2cp2", "dp", False),
    ],
)
def test_a_layout_that_divides_samples_alone_sums_their_gradients_during_backward(
    layout: str, data: str | None, listens: bool
) -> None:
    run = prepare(tiny_config({"parallel.layout": layout, "parallel.data": data}))
    assert ("parallel/dp" in run.hooks.plugins) == listens
    assert run.config.parallel.layout == layout
    assert (
        run.mesh.world_size == prepare(tiny_config({"parallel.layout": layout, "parallel.data": None})).mesh.world_size
    )
