"""What a plan says of parameters, and where placements put them."""

import math
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mplug import Axis, Box, Buffer, Flops, Init, Mesh, Parameter, Placement, Plan, Segment, UsageError, contiguous
from mplug.layout.ownership import flat_boxes

SPLIT_BY_TP = ("heads", "kv_heads", "mlp", "vocab")
NORMAL = Init("normal", std=0.02)


def tp(size: int, *activations: str) -> Axis:
    return Axis("tp", size, splits=SPLIT_BY_TP, activations=activations)


def dp(size: int) -> Axis:
    return Axis("dp", size, entries={"batch": contiguous}, distance=50)


def cp(size: int) -> Axis:
    return Axis("cp", size, entries={"sequence": contiguous}, distance=1)


def mesh_of(*axes: Axis) -> Mesh:
    return Mesh.of(axes, math.prod(axis.size for axis in axes if "dense" in axis.views))


def place(
    mesh: Mesh, shape: tuple[int, ...], *dims: object, over: tuple[str, ...] = ("batch", "sequence")
) -> Placement:
    return Placement("w", Parameter(dims, NORMAL, over=over), shape, mesh)  # type: ignore[arg-type]


Ints = tuple[int, ...]
Held = tuple[Ints, Ints, Ints, Ints, Ints]


def held(placement: Placement, rank: int) -> list[Held]:
    """(start, shape, offset, copies, partial) of every box of a rank."""
    boxes = placement.boxes(rank)
    return [(box.start, box.shape, box.offset, tuple(box.copies), tuple(box.partial)) for box in boxes]


VECTOR, MATRIX = Parameter(("embed",), NORMAL), Parameter(("mlp", "embed"), NORMAL)


def matched(patterns: dict[str, Parameter], *names: str) -> dict[str, Parameter]:
    return Plan((), patterns, {}, {}, Flops(0, 0)).match(names)


def test_a_star_stands_for_one_dotted_component() -> None:
    patterns = {"blocks.*.norm.weight": VECTOR, "head.weight": MATRIX}
    found = matched(patterns, "blocks.0.norm.weight", "blocks.11.norm.weight", "head.weight")
    assert found == {"blocks.0.norm.weight": VECTOR, "blocks.11.norm.weight": VECTOR, "head.weight": MATRIX}


HEAD = {"head.weight": MATRIX}


@pytest.mark.parametrize(
    ("patterns", "names", "said"),
    [
        ({"blocks.*.norm.weight": VECTOR}, ["blocks.0.1.norm.weight"], r"blocks\.0\.1\.norm\.weight"),
        (HEAD, ["head.wieght"], r"'head\.wieght'.*did you mean 'head\.weight'"),
        ({**HEAD, "head.bias": VECTOR}, ["head.weight"], r"'head\.bias'"),
        ({"*.weight": MATRIX, "head.*": MATRIX}, ["head.weight"], r"\*\.weight and head\.\*.*'head\.weight'"),
        *(
            (HEAD, ["head.weight", name], name.replace(".", r"\."))
            for name in ("headXweight", "head.weight.x", "x.head.weight", "head")
        ),
    ],
)
def test_patterns_that_do_not_match_each_parameter_once_are_refused(
    patterns: dict[str, Parameter], names: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        matched(patterns, *names)


def test_weight_decay_is_for_two_dimensions_and_more_unless_the_plan_says_otherwise() -> None:
    assert [one.decays for one in (VECTOR, MATRIX, Parameter(("expert", "mlp", "embed"), NORMAL))] == [
        False,
        True,
        True,
    ]
    assert [replace(one, decay=not one.decays).decays for one in (VECTOR, MATRIX)] == [True, False]


BUFFERS = {"blocks.*.load": Buffer(("expert",), over=("batch",)), "bias": Buffer(("expert",), value=2.0)}


def buffers(patterns: dict[str, Buffer], *names: str) -> dict[str, Buffer]:
    return replace(Plan((), {}, {}, {}, Flops(0, 0)), buffers=patterns).match_buffers(names)


def test_buffers_are_found_by_their_patterns_and_others_are_left_alone() -> None:
    found = buffers(BUFFERS, "blocks.0.load", "blocks.1.load", "bias", "site")
    statistic = {name: buffer.is_statistic for name, buffer in found.items()}
    assert statistic == {"blocks.0.load": True, "blocks.1.load": True, "bias": False}
    with pytest.raises(ValueError, match=r"no buffer matches the plan's pattern 'blocks\.\*\.load'"):
        buffers(BUFFERS, "bias")
    with pytest.raises(ValueError, match=r"two patterns .*bias"):
        buffers({"*": BUFFERS["bias"], "bias": BUFFERS["bias"]}, "bias")


# Placements by hand. Ranks of dp x tp are dp * tp_size + tp.


QKV = (Segment("heads", 8, 2), Segment("kv_heads", 2, 2, "copy"), Segment("kv_heads", 2, 2, "copy"))
"""Rows 0-15 are queries, 16-19 keys, 20-23 values."""


PADDED = Segment("vocab", 10, uneven="pad")
COLUMN, ROW, PADDED_OF_FOUR = (
    place(mesh_of(tp(2), dp(2)), (8, 3), "mlp", "embed"),
    place(mesh_of(tp(4)), (3, 8), "embed", Segment("mlp", 8)),
    place(mesh_of(tp(4)), (10, 2), PADDED, "embed"),
)
BY_HAND: dict[str, tuple[Placement, int, Ints, list[Held]]] = {
    "column parallel, first": (COLUMN, 0, (4, 3), [((0, 0), (4, 3), (0, 0), (0, 2), (0, 2))]),
    "column parallel, second": (COLUMN, 1, (4, 3), [((4, 0), (4, 3), (0, 0), (1, 3), (1, 3))]),
    "row parallel": (ROW, 2, (3, 2), [((0, 4), (3, 2), (0, 0), (2,), (2,))]),
    "ranks that share a KV head": (
        place(mesh_of(tp(4)), (24, 5), QKV, "embed"),
        2,
        (8, 5),
        [
            ((8, 0), (4, 5), (0, 0), (2,), (2,)),
            ((18, 0), (2, 5), (4, 0), (2, 3), (2, 3)),
            ((22, 0), (2, 5), (6, 0), (2, 3), (2, 3)),
        ],
    ),
    "data-parallel copies of a fused QKV": (
        place(mesh_of(tp(4), dp(2)), (24, 5), QKV, "embed"),
        6,
        (8, 5),
        [
            ((8, 0), (4, 5), (0, 0), (2, 6), (2, 6)),
            ((18, 0), (2, 5), (4, 0), (2, 3, 6, 7), (2, 3, 6, 7)),
            ((22, 0), (2, 5), (6, 0), (2, 3, 6, 7), (2, 3, 6, 7)),
        ],
    ),
    "KV heads that the ranks divide": (
        place(mesh_of(tp(2)), (24,), QKV),
        1,
        (12,),
        [
            ((8,), (8,), (0,), (1,), (1,)),
            ((18,), (2,), (8,), (1,), (1,)),
            ((22,), (2,), (10,), (1,), (1,)),
        ],
    ),
    "a padded vocabulary": (PADDED_OF_FOUR, 2, (3, 2), [((6, 0), (3, 2), (0, 0), (2,), (2,))]),
    "its end": (PADDED_OF_FOUR, 3, (3, 2), [((9, 0), (1, 2), (0, 0), (3,), (3,))]),
    "a segment after a padded one": (
        place(mesh_of(tp(2)), (9,), (Segment("vocab", 5, uneven="pad"), Segment("mlp", 4))),
        1,
        (5,),
        [((3,), (2,), (0,), (1,), (1,)), ((7,), (2,), (3,), (1,), (1,))],
    ),
    "split weights are not partial over sequence-parallel ranks": (
        place(mesh_of(tp(2, "sequence"), cp(2)), (8, 3), "mlp", "embed"),
        2,
        (4, 3),
        [((0, 0), (4, 3), (0, 0), (0, 2), (0, 2))],
    ),
    "a norm of heads is partial over the ranks that divide them": (
        place(mesh_of(tp(2), dp(2)), (16,), "head_dim", over=("batch", "sequence", "kv_heads")),
        3,
        (16,),
        [((0,), (16,), (0,), (0, 1, 2, 3), (0, 1, 2, 3))],
    ),
    "a stage": (
        Placement("w", VECTOR, (4,), mesh_of(dp(2), tp(2)), stage_axis="dp", stages=(1,)),
        2,
        (4,),
        [((0,), (4,), (0,), (2, 3), (2,))],
    ),
}


@pytest.mark.parametrize("case", BY_HAND.values(), ids=BY_HAND)
def test_a_rank_holds_the_boxes_that_are_computed_by_hand(case: tuple[Placement, int, Ints, list[Held]]) -> None:
    placement, rank, shape, boxes = case
    assert placement.local_shape(rank) == shape
    assert held(placement, rank) == boxes


@pytest.mark.parametrize(
    ("axes", "partial"),
    [
        ((tp(2), dp(2)), (0, 2)),
        ((tp(2, "sequence"), dp(2)), (0, 1, 2, 3)),
        ((tp(2), cp(2)), (0, 2)),
        ((tp(4),), (0,)),
        ((tp(2), Axis("pp", 2, distance=99, views=("dense", "sparse"))), (0,)),
    ],
)
def test_a_norm_is_partial_over_what_divides_batch_and_sequence(axes: tuple[Axis, ...], partial: Ints) -> None:
    assert held(place(mesh_of(*axes), (8,), "embed"), 0)[0][3:] == ((0, 1, 2, 3), partial)


def test_an_expert_is_partial_over_the_data_ranks_of_its_own_view() -> None:
    mesh = mesh_of(tp(2), dp(4), Axis("ep", 4, splits=("expert",), views=("sparse",)))
    expert = place(mesh, (8, 3), "expert", "embed")  # rank 5: sparse_data 1, ep 1
    assert held(expert, 5) == [((2, 0), (2, 3), (0, 0), (1, 5), (1, 5))]
    assert held(place(mesh, (3,), "embed"), 5)[0][-1] == (1, 3, 5, 7)


def test_what_experts_share_is_partial_over_all_ranks_of_their_view() -> None:
    ep, etp = (Axis(f"e{n}p", 2, splits=(f"expert{n}",), views=("sparse",)) for n in ("", "_mlp"))
    over = ("batch", "sequence", "expert", "expert_mlp")
    shared = place(mesh_of(tp(4), ep, etp), (3,), "embed", over=over)  # no axis of the dense view divides tokens
    assert held(shared, 1)[0][3:] == ((0, 1, 2, 3), (0, 1, 2, 3))
    of_width = place(mesh_of(tp(2), etp), (3,), "embed", over=("batch", "sequence", "expert_mlp"))
    assert held(of_width, 1)[0][-1] == (0, 1)


def test_a_gradient_without_a_view_of_the_axes_that_it_is_partial_over_is_refused() -> None:
    ep = Axis("ep", 2, splits=("expert",), views=("sparse",))
    over = ("batch", "sequence", "expert")
    with pytest.raises(UsageError, match="axes tp and ep split 'w' or what it is broadcast over, and no view"):
        place(mesh_of(tp(2), ep), (4, 3), "mlp", "embed", over=over).boxes(0)
    assert place(mesh_of(tp(2), replace(ep, size=1)), (4, 3), "mlp", "embed", over=over).boxes(0)


def test_data_parallelism_sums_over_what_divides_the_batchs_entries_in_the_view_of_the_parameter() -> None:
    ep = Axis("ep", 4, splits=("expert",), views=("sparse",))
    mesh = mesh_of(tp(2, "sequence"), cp(2), dp(2), ep)
    expert, norm = place(mesh, (8, 3), "expert", "embed"), place(mesh, (3,), "embed")
    assert expert.data_axes == expert.partial_axes == ("sparse_data",)
    assert (norm.data_axes, norm.partial_axes) == (("dp", "cp"), ("dp", "cp", "tp"))
    assert place(mesh, (3,), "embed", over=("sequence",)).data_axes == ("cp",)


ACME = Axis("acme", 2, splits=("mlp",))


@pytest.mark.parametrize(
    ("mesh", "shape", "dims", "said"),
    [
        (mesh_of(tp(4)), (12,), [Segment("heads", 6, 2)], "tp=4 does not divide the 6 heads"),
        (mesh_of(tp(4)), (6,), [Segment("kv_heads", 3, 2, "copy")], "tp=4 does not divide the 3 kv heads"),
        (mesh_of(tp(4)), (10,), [Segment("mlp", 10)], "tp=4 does not divide the 10 mlp"),
        (mesh_of(tp(2)), (4, 4), ["mlp", Segment("heads", 4)], "tp"),
        (mesh_of(tp(2), ACME), (4, 3), ["mlp", "embed"], "mlp"),
    ],
    ids=["heads", "kv heads", "mlp", "one axis of two dimensions", "two axes of one dimension"],
)
def test_degrees_that_do_not_fit_are_refused_saying_which(mesh: Mesh, shape: Ints, dims: list[Any], said: str) -> None:
    with pytest.raises((UsageError, ValueError), match=said):
        place(mesh, shape, *dims).boxes(0)


# Placements as a property: whatever the shape, all ranks together hold the logical tensor.

WIDTH = st.integers(1, 2)
BY_TP = st.one_of(
    st.builds(lambda n, w: Segment("mlp", 12 * n, w), WIDTH, WIDTH),
    st.builds(lambda n, w: Segment("vocab", n, w, "pad"), st.integers(1, 17), WIDTH),
    st.builds(lambda n, w: Segment("kv_heads", n, w, "copy"), st.sampled_from([1, 12]), st.integers(1, 3)),
    st.builds(lambda n, w: Segment("head_dim", n, w), st.integers(1, 5), WIDTH),
)
BY_FSDP = st.builds(lambda n, w: Segment("embed", 2 * n, w), st.integers(1, 3), WIDTH)
BY_EP = st.builds(lambda n, w: Segment("expert", 4 * n, w), WIDTH, WIDTH)
BY_ETP = st.builds(lambda n, w: Segment("expert_mlp", 2 * n, w), WIDTH, WIDTH)


def fused(segments: st.SearchStrategy[Segment]) -> st.SearchStrategy[tuple[Segment, ...]]:
    return st.lists(segments, min_size=1, max_size=3).map(tuple)


DENSE = st.tuples(fused(BY_TP), fused(BY_FSDP))
DIMS = st.one_of(
    st.tuples(fused(BY_TP)),
    st.tuples(fused(st.one_of(BY_TP, BY_FSDP))),
    DENSE,
    DENSE.map(lambda dims: dims[::-1]),
    st.tuples(fused(BY_EP), fused(BY_ETP)),
)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    dims = draw(DIMS)
    shape = tuple(sum(segment.length for segment in dim) for dim in dims)
    one_or_two = st.sampled_from([1, 2])
    axes = [tp(draw(st.sampled_from([1, 2, 3, 4])), *draw(st.sampled_from([(), ("sequence",)])))]
    axes += [dp(draw(one_or_two)), cp(draw(one_or_two))]
    axes.append(Axis("fsdp", draw(one_or_two), splits=("embed",), entries={"batch": contiguous}, distance=40))
    world_size = math.prod(axis.size for axis in axes)
    etp = draw(st.sampled_from([size for size in (1, 2) if world_size % size == 0]))
    ep = draw(st.sampled_from([size for size in (1, 2, 4) if world_size % (size * etp) == 0]))
    axes.append(Axis("etp", etp, splits=("expert_mlp",), views=("sparse",)))
    axes.append(Axis("ep", ep, splits=("expert",), distance=1, views=("sparse",)))
    kinds = Parameter(dims, NORMAL).axes
    wider = [("heads",)] if kinds.isdisjoint(("expert", "expert_mlp")) else [("expert",), ("expert", "expert_mlp")]
    if kinds.isdisjoint((*SPLIT_BY_TP, "embed")):
        wider.append(("expert", "expert_mlp"))
    over = draw(st.sampled_from([(), *wider]))
    return place(Mesh.of(axes, world_size), shape, *dims, over=("batch", "sequence", *over))


def cells(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))


@settings(max_examples=100)
@given(placements())
def test_owners_cover_every_element_once_and_ranks_agree_on_copies_and_sums(placement: Placement) -> None:
    owned = np.zeros(placement.shape, dtype=int)
    boxes = {rank: placement.boxes(rank) for rank in placement.holders}
    places = {rank: {(box.start, box.shape): box.partial for box in own} for rank, own in boxes.items()}
    for rank, own in boxes.items():
        local = np.zeros(placement.local_shape(rank), dtype=int)
        for box in own:
            at = (box.start, box.shape)
            assert tuple(box.copies) == tuple(other for other in placement.holders if at in places[other])
            assert rank in box.partial
            assert set(box.partial) <= set(box.copies)
            assert all(places[other][at] == box.partial for other in box.partial)
            if min(box.copies) == rank:
                owned[cells(box.start, box.shape)] += 1
            assert all(o + n <= size for o, n, size in zip(box.offset, box.shape, local.shape, strict=True))
            local[cells(box.offset, box.shape)] += 1
        assert local.max(initial=0) <= 1
    assert (owned == 1).all()


@pytest.mark.parametrize("shape", [(), (7,), (1, 5), (5, 1), (4, 3), (3, 4), (2, 3, 2), (3, 1, 4)])
def test_flat_boxes_are_the_elements_of_a_flat_range_in_order(shape: Ints) -> None:
    flat = np.arange(math.prod(shape))
    for start, stop in combinations_with_replacement(range(len(flat) + 1), 2):
        local = np.full(stop - start, -1)
        for box in flat_boxes(shape, start, stop):
            assert box.numel > 0
            (offset,) = box.offset
            local[offset : offset + box.numel] = flat.reshape(shape)[cells(box.start, box.shape)].ravel()
        assert (local == flat[start:stop]).all(), (start, stop)


def test_a_flat_range_that_begins_and_ends_inside_rows_is_head_middle_and_tail() -> None:
    assert flat_boxes((5, 4), 6, 17) == (
        Box((1, 2), (1, 2), (0,)),
        Box((2, 0), (2, 4), (2,)),
        Box((4, 0), (1, 1), (10,)),
    )
