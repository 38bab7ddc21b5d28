"""Who owns what: arithmetic without processes."""

import math
from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_runs import under
from mplug_zero.layout import ALIGNED, Item, in_buckets, owning_axes

from mplug import UsageError, hookimpl
from mplug.gradients.region import region
from mplug.layout.ownership import ShardedPlacement
from mplug.layout.placement import Placement
from mplug.model.build import build_model
from mplug.run.prepare import prepare
from mplug_testing.harness import tiny_config, tiny_run
from mplug_testing.layouts import require_exact_cover

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=12)
RANKS = st.integers(1, 9)


def items(sizes: list[int]) -> list[Item]:
    return [Item(f"p{number}", size, ("zero",)) for number, size in enumerate(sizes)]


# Ranges.


@given(SIZES, RANKS, st.integers(1, 20_000))
@settings(max_examples=60)
def test_ranges_are_equal_cover_a_bucket_and_give_every_element_to_one_rank(
    sizes: list[int], ranks: int, numel: int
) -> None:
    buckets = list(in_buckets(items(sizes), numel, {("zero",): ranks}))
    assert [name for bucket in buckets for name in bucket.names] == [f"p{n}" for n in range(len(sizes))]
    for bucket in buckets:
        owned = [element for owner in range(ranks) for element in range(bucket.length)[bucket.owned(owner)]]
        assert owned == list(range(bucket.length))
        assert bucket.length - sum(bucket.sizes) < ALIGNED * (ranks + len(bucket.sizes))
        assert all(start % ALIGNED == 0 for start in bucket.starts)
        for name, size in zip(bucket.names, bucket.sizes, strict=True):
            parts = [bucket.part(name, owner) for owner in range(ranks)]
            assert [e for start, stop in parts for e in range(start, stop)] == list(range(size))


@given(SIZES, st.integers(1, 20_000))
@settings(max_examples=60)
def test_a_bucket_is_as_small_as_its_size_allows(sizes: list[int], numel: int) -> None:
    buckets = list(in_buckets(items(sizes), numel, {("zero",): 1}))
    for bucket in buckets[:-1]:
        assert sum(bucket.sizes) >= numel > sum(bucket.sizes[:-1])


def test_what_is_alone_and_what_other_ranks_share_lies_in_buckets_of_its_own() -> None:
    mixed = [Item("a", 5, ("zero",)), Item("b", 5, ("zero",), alone=True), Item("c", 5, ("edp",))]
    mixed += [Item("d", 5, ("zero",), ("dp",)), Item("e", 5, ("zero",))]
    buckets = list(in_buckets(mixed, 10**6, {("zero",): 2, ("edp",): 4}))
    assert sorted(bucket.names for bucket in buckets) == [("a", "e"), ("b",), ("c",), ("d",)]
    assert {bucket.axes: bucket.num_owners for bucket in buckets} == {("zero",): 2, ("edp",): 4}


# Placements.


@cache
def placements(layout: str) -> tuple[dict[str, Placement], dict[int, dict[str, ShardedPlacement]]]:
    """Those of the whole model, and what every rank says of the parts of what it has."""
    run = tiny_run(under(layout, EXPERTS if "ep" in layout.split()[0] else {}))
    found = {}
    for rank in range(run.mesh.world_size):
        run.rank = rank
        model = build_model(run)
        assert model.sharding is not None
        found[rank] = {name: model.sharding.placed(model.placements[name]) for name in model.sharding.of}
    return model.placements, found


EXPERTS: dict[str, Any] = {**tiny_models.EXPERTS, "model.vocab_size": 320}
CASES = [
    "zero4",
    "zero3 trainer.global_batch_size=6",
    "tp2zero2 model.tie_embeddings=true",
    "tp4zero2 model.num_kv_heads=2",
    "dp2zero2pp2 model.tie_embeddings=true",
    "zero4ep2",
    "dp2zero2ep2etp2",
    "zero2pp2 model.tie_embeddings=true",
    "zero1cp2 parallel.zero.over=data",
    "dp2zero2 parallel.zero.over=data",
    "zero2cp2ep2 parallel.zero.over=data",
]


@pytest.mark.parametrize("layout", CASES)
def test_the_parts_of_all_ranks_are_every_parameter_once_and_holders_know_each_other(layout: str) -> None:
    whole, found = placements(f"{layout} parallel.zero.bucket_mib=0.02")
    for name, placement in whole.items():
        said = [found[rank][name] for rank in found if name in found[rank]]
        if not said:
            assert math.prod(placement.mesh.axes[axis].size for axis in placement.data_axes) == 1
            continue
        tables = [[one.boxes(rank) for rank in found] for one in said]
        assert all(table == tables[0] for table in tables), name
        require_exact_cover(said[0])
        assert {rank for rank in found if said[0].boxes(rank)} == set(said[0].holders)
        assert placement.numel == said[0].numel


@pytest.mark.parametrize("layout", CASES)
def test_the_boxes_of_a_part_are_the_elements_that_lie_in_its_range_of_the_local_tensor(layout: str) -> None:
    _, found = placements(f"{layout} parallel.zero.bucket_mib=0.02")
    for rank, placed in found.items():
        for sharded in placed.values():
            numbers = torch.arange(float(sharded.numel)).view(sharded.shape) + 1
            local, part = torch.zeros(sharded.whole.local_shape(rank)), torch.zeros(sharded.local_shape(rank))
            for tensor, boxes in ((local, sharded.whole.boxes(rank)), (part, sharded.boxes(rank))):
                for box in boxes:
                    region(tensor, box).copy_(_at(numbers, box))
            start, stop = sharded.part(rank)
            assert torch.equal(part.flatten(), local.flatten()[start:stop])


def _at(tensor: torch.Tensor, box: Any) -> torch.Tensor:
    return tensor[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))]


@pytest.mark.parametrize(("over", "axes"), [("zero", (("zero",), ("dp",))), ("data", (("dp", "zero"), ()))])
def test_owners_of_parts_have_copies_along_the_other_axes_over_which_gradients_are_partial(
    over: Any, axes: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    run = tiny_run({"parallel.layout": "dp2zero2"})
    assert {owning_axes(run.mesh, placement, over) for placement in build_model(run).placements.values()} == {axes}


def test_a_part_of_two_dimensions_in_one_segment_is_at_most_three_boxes() -> None:
    whole, found = placements("zero4")
    for name, placement in whole.items():
        segments = math.prod(len(dim) for dim in placement.dims)
        assert all(len(found[rank][name].boxes(rank)) <= 2 + segments for rank in found)


class Other:
    @hookimpl
    def shard_states(self) -> None:
        return None


def test_two_strategies_that_divide_states_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"host/other and parallel/zero .*'shard_states'.*takes one answer"):
        prepare(tiny_config({"parallel.layout": "zero2"}), {"host/other": Other()})
