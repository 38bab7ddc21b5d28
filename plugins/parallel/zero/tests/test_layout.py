"""Who owns what: arithmetic without processes."""

import math
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_runs import under
from mplug_zero.layout import ALIGNED, Item, in_buckets, in_matrices, in_ranges, owners

from mplug import Axis, Init, Mesh, Optimizer, Parameter, Piece, Sharding, StepScalars, UsageError, contiguous, hookimpl
from mplug.gradients.region import region
from mplug.layout.ownership import Bucket, ShardedPlacement, Stretch
from mplug.layout.placement import Placement
from mplug.model.build import build_model
from mplug.registry.hooks import Hooks
from mplug.run.prepare import prepare
from mplug_testing.harness import tiny_config, tiny_run
from mplug_testing.layouts import require_exact_cover

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=12)
PARTS = st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=6), min_size=1, max_size=15)
RANKS = st.integers(1, 9)


def items(sizes: list[int]) -> list[Item]:
    return [Item(f"p{number}", (size,), ("zero",)) for number, size in enumerate(sizes)]


# Ranges.


@given(SIZES, RANKS, st.integers(1, 20_000))
@settings(max_examples=60)
def test_ranges_are_equal_cover_a_bucket_and_give_every_element_to_one_rank(
    sizes: list[int], ranks: int, numel: int
) -> None:
    buckets = [in_ranges(bucket, ranks) for bucket in in_buckets(items(sizes), numel)]
    assert [name for bucket in buckets for name in bucket.names] == [f"p{n}" for n in range(len(sizes))]
    for bucket in buckets:
        assert bucket.is_even(ranks)
        assert not bucket.is_even(ranks + 1)
        assert [stretch.start for owner in range(ranks) for stretch in bucket.of_owner(owner)] == [
            owner * bucket.length // ranks for owner in range(ranks)
        ]
        assert bucket.length - sum(bucket.sizes) < ALIGNED * (ranks + len(bucket.sizes))
        assert all(start % ALIGNED == 0 for start in bucket.starts)
        for name, size in zip(bucket.names, bucket.sizes, strict=True):
            parts = [bucket.part(name, owner) for owner in range(ranks)]
            assert [e for start, stop in parts for e in range(start, stop)] == list(range(size))


@given(SIZES, st.integers(1, 20_000))
@settings(max_examples=60)
def test_a_bucket_is_as_small_as_its_size_allows(sizes: list[int], numel: int) -> None:
    buckets = list(in_buckets(items(sizes), numel))
    for bucket in buckets[:-1]:
        assert sum(bucket.sizes) >= numel > sum(bucket.sizes[:-1])


def test_what_is_alone_and_what_other_ranks_share_lies_in_buckets_of_its_own() -> None:
    mixed = [Item("a", (5,), ("zero",)), Item("b", (5,), ("zero",), alone=True), Item("c", (5,), ("edp",))]
    mixed += [Item("d", (5,), ("zero",), ("dp",)), Item("e", (5,), ("zero",))]
    assert sorted(bucket.names for bucket in in_buckets(mixed, 10**6)) == [("a", "e"), ("b",), ("c",), ("d",)]


# Matrices.


@given(PARTS, RANKS)
@settings(max_examples=80)
def test_matrices_stay_whole_in_one_stretch_a_rank_and_are_balanced(parts: list[list[int]], ranks: int) -> None:
    named = {f"p{number}": tuple(one) for number, one in enumerate(parts)}
    given_to = owners(named, ranks)
    for name, one in named.items():
        stretches, edges = given_to[name], {sum(one[:n]) for n in range(len(one) + 1)}
        assert [e for s in stretches for e in (s.start, s.stop)] == sorted(
            e for s in stretches for e in (s.start, s.stop)
        )
        assert stretches[0].start == 0
        assert stretches[-1].stop == sum(one)
        assert all(before.stop == after.start for before, after in pairwise(stretches))
        assert {edge for s in stretches for edge in (s.start, s.stop)} <= edges
        assert len({s.owner for s in stretches}) == len(stretches)
    # When a part finds its owner, at most the owners of the other parts of its tensor are out of the question, and of
    # the others it gets the one with the smallest load.
    most = max(map(len, parts))
    largest = max(part for one in named.values() for part in one)
    assert max(loads_of(given_to).values()) <= sum(map(sum, parts)) / max(1, ranks - most + 1) + largest + _rest(
        named, ranks
    )


def _rest(named: dict[str, tuple[int, ...]], ranks: int) -> int:
    """What the last of all ranks must take of a tensor that all the others have a stretch of already."""
    return max((sum(one) for one in named.values() if len(one) > ranks), default=0)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"a": (4, 4), "b": (4, 4)}, {"a": [(0, 8, 0)], "b": [(0, 8, 1)]}),
        ({"a": (3, 3, 3), "b": (5,)}, {"a": [(0, 6, 0), (6, 9, 1)], "b": [(0, 5, 1)]}),
        ({"a": (1, 1), "b": (6, 6), "c": (2,)}, {"b": [(0, 6, 0), (6, 12, 1)], "a": [(0, 2, 0)], "c": [(0, 2, 1)]}),
    ],
)
def test_owners_that_are_found_by_hand(
    parts: dict[str, tuple[int, ...]], expected: dict[str, list[tuple[int, int, int]]]
) -> None:
    """The averages are 8, 7 and 8: an owner takes parts of a tensor up to it, and the least loaded one comes next."""
    found = owners(parts, 2)
    assert {name: [(s.start, s.stop, s.owner) for s in one] for name, one in found.items()} == expected


@pytest.mark.parametrize(
    ("stretches", "even"),
    [
        ([(0, 4, 0), (4, 8, 1), (8, 12, 2)], True),
        ([(0, 4, 0), (4, 8, 2), (8, 12, 1)], False),
        ([(0, 5, 0), (5, 8, 1), (8, 12, 2)], False),
        ([(0, 4, 0), (4, 8, 1)], False),
    ],
)
def test_stretches_are_even_if_owners_in_order_have_equal_ones(
    stretches: list[tuple[int, int, int]], even: bool
) -> None:
    bucket = Bucket(("a",), (0,), (12,), 12, ("zero",), tuple(Stretch(*one) for one in stretches))
    assert bucket.is_even(3) == even


def test_the_second_half_of_the_rows_is_kept_from_the_first_row_of_its_owner_on() -> None:
    """[4, 3] in two stretches of two rows each."""
    mesh = Mesh.of([Axis("zero", 2, entries={"batch": contiguous})], 2)
    whole = Placement("a", Parameter(("mlp", "embed"), Init("constant")), (4, 3), mesh)
    bucket = Bucket(("a",), (0,), (12,), 12, ("zero",), (Stretch(0, 6, 0), Stretch(6, 12, 1)))
    placed = Sharding((bucket,), matrices=True).placed(whole)
    boxes = [[(box.start, box.shape, box.offset) for box in placed.boxes(rank)] for rank in range(2)]
    assert boxes == [[((0, 0), (2, 3), (0, 0))], [((2, 0), (2, 3), (0, 0))]]


def test_alike_matrices_are_divided_evenly() -> None:
    loads = loads_of(owners({f"p{number}": (100, 50, 50) for number in range(8)}, 4))
    assert loads == dict.fromkeys(range(4), 400)


def loads_of(given_to: dict[str, Any]) -> Counter[int]:
    loads = Counter[int]()
    for stretch in (stretch for stretches in given_to.values() for stretch in stretches):
        loads[stretch.owner] += stretch.length
    return loads


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_matrices_of_a_transformer_are_divided_within_a_tenth_of_the_average(ranks: int) -> None:
    dim, named = 64, {"embedding": (512 * 64,)}
    for number in range(12):
        named |= {f"{number}.qkv": (dim * dim,) * 3, f"{number}.out": (dim * dim,)}
        named |= {f"{number}.up": (4 * dim * dim,) * 2, f"{number}.down": (4 * dim * dim,)}
    assert max(loads_of(owners(named, ranks)).values()) <= 1.1 * sum(map(sum, named.values())) / ranks


def test_buckets_of_other_ranks_are_left_alone() -> None:
    first, second = in_buckets([Item("a", (6,), ("zero",)), Item("b", (3, 3), ("edp",))], 1)
    (own,) = in_matrices([first, second], {"a": (6,), "b": (3, 3)}, ("edp",), 2)
    assert own.names == ("b",)
    assert [(s.start, s.stop, s.owner) for s in own.stretches] == [(0, 3, 0), (3, 6, 1)]


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
    "zero4 optimizer.name=muon",
    "zero2pp2 optimizer.name=muon model.tie_embeddings=true",
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
def test_the_boxes_of_a_part_are_the_elements_that_lie_in_its_stretch_of_the_local_tensor(layout: str) -> None:
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


def test_a_part_of_two_dimensions_in_one_segment_is_at_most_three_boxes() -> None:
    whole, found = placements("zero4")
    for name, placement in whole.items():
        segments = math.prod(len(dim) for dim in placement.dims)
        assert all(len(found[rank][name].boxes(rank)) <= 2 + segments for rank in found)


def test_muon_owns_about_as_much_on_every_rank() -> None:
    _, found = placements("zero4 optimizer.name=muon model.num_layers=8")
    loads = [
        sum(stop - start for one in placed.values() for start, stop in [one.part(rank)])
        for rank, placed in found.items()
    ]
    assert max(loads) < 1.1 * sum(loads) / len(loads)


# Refusals.


class Rows(Optimizer):
    needs = "rows"

    @hookimpl
    def build_optimizer(self) -> "Rows":
        return self

    def step(self, scalars: StepScalars) -> None:
        raise AssertionError("no step is made")

    def state(self, piece: Piece) -> dict[str, torch.Tensor]:
        return {}


def test_an_optimizer_with_other_needs_is_accepted_on_one_rank_and_refused_before_launch_on_two() -> None:
    one, two = (tiny_run({"parallel.layout": layout}) for layout in ("zero1", "zero2"))
    for run in (one, two):
        plugins = {label: own for label, own in run.hooks.plugins.items() if not label.startswith("optimizers/")}
        run.hooks = Hooks({**plugins, "optimizers/rows": Rows()})
    assert build_model(one).sharding is None
    with pytest.raises(UsageError, match=r"optimizers/rows needs 'rows' of parameters, and zero=2 .* without zero"):
        build_model(two)


def test_what_one_rank_owns_alone_is_no_even_division() -> None:
    (bucket,) = in_matrices(in_buckets([Item("p", (128,), ("zero",))], 1), {"p": (128,)}, ("zero",), 2)
    assert bucket.stretches == (Stretch(0, 128, 0),)
    assert not bucket.is_even(2)
    assert bucket.is_even(1)


class Other:
    @hookimpl
    def shard_states(self) -> None:
        return None


def test_two_strategies_that_divide_states_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"host/other and parallel/zero .*'shard_states'.*takes one answer"):
        prepare(tiny_config({"parallel.layout": "zero2"}), {"host/other": Other()})
