"""What a plan says of parameters, and where placements put them."""

import math
from dataclasses import replace

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
    described = Parameter(dims, NORMAL, over=over)  # type: ignore[arg-type]
    return Placement("w", described, shape, mesh)


def listed(boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    """The boxes with tuples of ranks."""
    return tuple(replace(box, copies=tuple(box.copies), partial=tuple(box.partial)) for box in boxes)  # type: ignore[arg-type]


# Patterns.


def plan_of(**parameters: Parameter) -> Plan:
    return Plan((), {pattern.replace("__", "."): p for pattern, p in parameters.items()}, {}, {}, Flops(0, 0))


VECTOR, MATRIX = Parameter(("embed",), NORMAL), Parameter(("mlp", "embed"), NORMAL)


def test_a_star_stands_for_one_dotted_component() -> None:
    plan = Plan((), {"blocks.*.norm.weight": VECTOR, "head.weight": MATRIX}, {}, {}, Flops(0, 0))
    found = plan.match(["blocks.0.norm.weight", "blocks.11.norm.weight", "head.weight"])
    assert found == {"blocks.0.norm.weight": VECTOR, "blocks.11.norm.weight": VECTOR, "head.weight": MATRIX}
    with pytest.raises(ValueError, match=r"blocks\.0\.1\.norm\.weight"):
        plan.match(["blocks.0.1.norm.weight", "head.weight"])


def test_a_parameter_without_a_pattern_is_an_error_that_suggests_one() -> None:
    with pytest.raises(ValueError, match=r"'head\.wieght'.*did you mean 'head\.weight'"):
        plan_of(head__weight=MATRIX).match(["head.wieght"])


def test_a_pattern_without_a_parameter_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'head\.bias'"):
        plan_of(head__weight=MATRIX, head__bias=VECTOR).match(["head.weight"])


def test_two_patterns_for_one_parameter_are_an_error_naming_both() -> None:
    plan = Plan((), {"*.weight": MATRIX, "head.*": MATRIX}, {}, {}, Flops(0, 0))
    with pytest.raises(ValueError, match=r"\*\.weight and head\.\*.*'head\.weight'"):
        plan.match(["head.weight"])


@pytest.mark.parametrize("name", ["headXweight", "head.weight.x", "x.head.weight", "head"])
def test_a_pattern_means_its_dots_and_all_of_the_name(name: str) -> None:
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        plan_of(head__weight=MATRIX).match(["head.weight", name])


@pytest.mark.parametrize(
    ("parameter", "decays"),
    [
        (VECTOR, False),
        (MATRIX, True),
        (Parameter(("embed",), NORMAL, decay=True), True),
        (Parameter(("vocab", "embed"), NORMAL, decay=False), False),
        (Parameter(("expert", "mlp", "embed"), NORMAL), True),
    ],
)
def test_weight_decay_is_for_two_dimensions_and_more_unless_the_plan_says_otherwise(
    parameter: Parameter, decays: bool
) -> None:
    assert parameter.decays is decays


BUFFERS = {"blocks.*.load": Buffer(("expert",), over=("batch",)), "bias": Buffer(("expert",), value=2.0)}


def test_buffers_are_found_by_their_patterns_and_others_are_left_alone() -> None:
    found = replace(plan_of(), buffers=BUFFERS).match_buffers(["blocks.0.load", "blocks.1.load", "bias", "site"])
    assert {name: buffer.is_statistic for name, buffer in found.items()} == {
        "blocks.0.load": True,
        "blocks.1.load": True,
        "bias": False,
    }


def test_a_pattern_without_a_buffer_or_two_of_one_are_errors() -> None:
    with pytest.raises(ValueError, match=r"no buffer matches the plan's pattern 'blocks\.\*\.load'"):
        replace(plan_of(), buffers=BUFFERS).match_buffers(["bias"])
    with pytest.raises(ValueError, match=r"two patterns .*bias"):
        replace(plan_of(), buffers={"*": BUFFERS["bias"], "bias": BUFFERS["bias"]}).match_buffers(["bias"])


# Placements by hand. Ranks of dp x tp are dp * tp_size + tp.


def test_an_output_axis_that_is_split_is_column_parallel() -> None:
    placement = place(mesh_of(tp(2), dp(2)), (8, 3), "mlp", "embed")
    assert listed(placement.boxes(0)) == (Box((0, 0), (4, 3), (0, 0), (0, 2), (0, 2)),)
    assert listed(placement.boxes(1)) == (Box((4, 0), (4, 3), (0, 0), (1, 3), (1, 3)),)
    assert placement.boxes(3) == placement.boxes(1)
    assert [placement.local_shape(rank) for rank in range(4)] == [(4, 3)] * 4


def test_an_input_axis_that_is_split_is_row_parallel() -> None:
    placement = place(mesh_of(tp(4)), (3, 8), "embed", Segment("mlp", 8))
    assert listed(placement.boxes(2)) == (Box((0, 4), (3, 2), (0, 0), (2,), (2,)),)


QKV = (Segment("heads", 8, 2), Segment("kv_heads", 2, 2, "copy"), Segment("kv_heads", 2, 2, "copy"))
"""Rows 0-15 are queries, 16-19 keys, 20-23 values."""


@pytest.mark.parametrize(
    ("rank", "query", "key", "value", "copies"),
    [(0, 0, 16, 20, (0, 1)), (1, 4, 16, 20, (0, 1)), (2, 8, 18, 22, (2, 3)), (3, 12, 18, 22, (2, 3))],
)
def test_ranks_that_share_a_kv_head_hold_copies_whose_gradients_add_up(
    rank: int, query: int, key: int, value: int, copies: tuple[int, ...]
) -> None:
    placement = place(mesh_of(tp(4)), (24, 5), QKV, "embed")
    assert placement.local_shape(rank) == (8, 5)
    assert listed(placement.boxes(rank)) == (
        Box((query, 0), (4, 5), (0, 0), (rank,), (rank,)),
        Box((key, 0), (2, 5), (4, 0), copies, copies),
        Box((value, 0), (2, 5), (6, 0), copies, copies),
    )


def test_data_parallel_copies_of_a_fused_qkv_add_up_too() -> None:
    placement = place(mesh_of(tp(4), dp(2)), (24, 5), QKV, "embed")
    queries, keys, values = placement.boxes(6)  # dp 1, tp 2
    assert (queries.start, [*queries.copies], [*queries.partial]) == ((8, 0), [2, 6], [2, 6])
    assert (keys.start, [*keys.copies], [*keys.partial]) == ((18, 0), [2, 3, 6, 7], [2, 3, 6, 7])
    assert (values.start, [*values.copies], [*values.partial]) == ((22, 0), [2, 3, 6, 7], [2, 3, 6, 7])


def test_kv_heads_that_the_ranks_divide_are_split_and_nobody_shares_them() -> None:
    placement = place(mesh_of(tp(2)), (24,), QKV)
    assert placement.local_shape(1) == (12,)
    assert listed(placement.boxes(1)) == (
        Box((8,), (8,), (0,), (1,), (1,)),
        Box((18,), (2,), (8,), (1,), (1,)),
        Box((22,), (2,), (10,), (1,), (1,)),
    )


def test_a_vocabulary_that_the_ranks_do_not_divide_is_padded_at_its_end() -> None:
    placement = place(mesh_of(tp(4)), (10, 2), Segment("vocab", 10, uneven="pad"), "embed")
    assert [placement.local_shape(rank) for rank in range(4)] == [(3, 2)] * 4
    assert listed(placement.boxes(2)) == (Box((6, 0), (3, 2), (0, 0), (2,), (2,)),)
    assert listed(placement.boxes(3)) == (Box((9, 0), (1, 2), (0, 0), (3,), (3,)),)


def test_a_fused_segment_after_a_padded_one_comes_after_its_padding() -> None:
    fused = (Segment("vocab", 5, uneven="pad"), Segment("mlp", 4))
    placement = place(mesh_of(tp(2)), (9,), fused)
    assert placement.local_shape(1) == (5,)
    assert listed(placement.boxes(1)) == (Box((3,), (2,), (0,), (1,), (1,)), Box((7,), (2,), (3,), (1,), (1,)))


def test_segments_of_two_dimensions_make_a_box_for_each_pair() -> None:
    placement = place(
        mesh_of(tp(2)), (4, 6), (Segment("mlp", 2), Segment("embed", 2)), (Segment("a", 1), Segment("b", 5))
    )
    assert [(box.start, box.shape, box.offset) for box in placement.boxes(1)] == [
        ((1, 0), (1, 1), (0, 0)),
        ((1, 1), (1, 5), (0, 1)),
        ((2, 0), (2, 1), (1, 0)),
        ((2, 1), (2, 5), (1, 1)),
    ]


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
def test_a_norm_is_partial_over_what_divides_batch_and_sequence(
    axes: tuple[Axis, ...], partial: tuple[int, ...]
) -> None:
    (box,) = place(mesh_of(*axes), (8,), "embed").boxes(0)
    assert tuple(box.copies) == (0, 1, 2, 3)
    assert tuple(box.partial) == partial


@pytest.mark.parametrize("named", ["heads", "kv_heads"])
def test_a_qk_norm_is_partial_over_the_ranks_that_divide_the_heads_too(named: str) -> None:
    placement = place(mesh_of(tp(2), dp(2)), (16,), "head_dim", over=("batch", "sequence", named))
    (box,) = placement.boxes(3)
    assert listed((box,)) == (Box((0,), (16,), (0,), (0, 1, 2, 3), (0, 1, 2, 3)),)


def test_a_split_weight_is_partial_over_context_ranks_and_not_over_sequence_parallel_tensor_ranks() -> None:
    placement = place(mesh_of(tp(2, "sequence"), cp(2)), (8, 3), "mlp", "embed")
    (box,) = placement.boxes(2)  # cp 1, tp 0
    assert ([*box.copies], [*box.partial]) == ([0, 2], [0, 2])


def test_an_expert_is_partial_over_the_data_ranks_of_its_own_view() -> None:
    ep = Axis("ep", 4, splits=("expert",), views=("sparse",))
    mesh = mesh_of(tp(2), dp(4), ep)
    placement = place(mesh, (8, 3), "expert", "embed")
    (box,) = placement.boxes(5)  # sparse_data 1, ep 1
    assert listed((box,)) == (Box((2, 0), (2, 3), (0, 0), (1, 5), (1, 5)),)
    (dense,) = place(mesh, (3,), "embed").boxes(5)
    assert tuple(dense.partial) == (1, 3, 5, 7)


def test_what_experts_share_is_partial_over_all_ranks_of_their_view() -> None:
    ep, etp = (Axis(f"e{n}p", 2, splits=(f"expert{n}",), views=("sparse",)) for n in ("", "_mlp"))
    mesh = mesh_of(tp(4), ep, etp)  # no axis of the dense view divides tokens
    over = ("batch", "sequence", "expert", "expert_mlp")
    (shared,) = place(mesh, (3,), "embed", over=over).boxes(1)
    assert ([*shared.copies], [*shared.partial]) == ([0, 1, 2, 3], [0, 1, 2, 3])
    (of_width,) = place(mesh_of(tp(2), etp), (3,), "embed", over=("batch", "sequence", "expert_mlp")).boxes(1)
    assert [*of_width.partial] == [0, 1]


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


def test_only_holders_hold() -> None:
    stage = Placement("w", VECTOR, (4,), mesh_of(dp(2), tp(2)), stage_axis="dp", stages=(1,))
    assert stage.boxes(0) == ()
    assert listed(stage.boxes(2)) == (Box((0,), (4,), (0,), (2, 3), (2,)),)


# Refusals.


@pytest.mark.parametrize(
    ("segment", "said"),
    [
        (Segment("heads", 6, 2), "tp=4 does not divide the 6 heads"),
        (Segment("kv_heads", 3, 2, "copy"), "tp=4 does not divide the 3 kv heads"),
        (Segment("mlp", 10), "tp=4 does not divide the 10 mlp"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_saying_which_number_does_not_divide_which(
    segment: Segment, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        place(mesh_of(tp(4)), (segment.length,), segment).boxes(0)


def test_one_mesh_axis_cannot_split_two_dimensions_of_a_parameter() -> None:
    with pytest.raises((UsageError, ValueError), match="tp"):
        place(mesh_of(tp(2)), (4, 4), "mlp", Segment("heads", 4)).boxes(0)


def test_two_mesh_axes_cannot_split_one_named_axis() -> None:
    with pytest.raises((UsageError, ValueError), match="mlp"):
        place(mesh_of(tp(2), Axis("acme", 2, splits=("mlp",))), (4, 3), "mlp", "embed").boxes(0)


KV_HEAD = Segment("kv_heads", 1, 2, "copy")


@pytest.mark.parametrize(
    ("shape", "dims", "cut"),
    [
        ((6, 4), ("mlp", "embed"), ("tp",)),
        ((4, 6), ("embed", "mlp"), ("tp",)),
        ((12, 3), ((Segment("heads", 4, 2), KV_HEAD, KV_HEAD), "embed"), ("tp",)),
        ((4, 3), ((KV_HEAD, KV_HEAD), "embed"), ()),
        ((6,), ("mlp",), ()),
        ((4, 3), ("positions", "embed"), ()),
        ((2, 3, 5), ("mlp", "embed", "head_dim"), ()),
        ((2, 3, 4), ("expert", "embed", "mlp"), ("tp",)),
    ],
    ids=["column", "row", "fused", "copies", "vector", "not split", "a matrix each", "each matrix cut"],
)
def test_a_matrix_is_cut_where_a_rank_holds_a_part_of_a_segment_of_the_last_two_dimensions(
    shape: tuple[int, ...], dims: tuple[object, ...], cut: tuple[str, ...]
) -> None:
    assert place(mesh_of(tp(2), dp(2)), shape, *dims).cut_by == cut
    assert place(mesh_of(tp(1), dp(2)), shape, *dims).cut_by == ()


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


@settings(max_examples=80)
@given(placements())
def test_the_boxes_of_the_owners_cover_every_element_exactly_once(placement: Placement) -> None:
    owned = np.zeros(placement.shape, dtype=int)
    for rank in placement.holders:
        for box in placement.boxes(rank):
            assert rank in box.copies
            if min(box.copies) == rank:
                owned[cells(box.start, box.shape)] += 1
    assert (owned == 1).all()


@settings(max_examples=80)
@given(placements())
def test_local_regions_fit_the_local_tensor_and_never_overlap(placement: Placement) -> None:
    for rank in placement.holders:
        local = np.zeros(placement.local_shape(rank), dtype=int)
        for box in placement.boxes(rank):
            assert all(o + n <= size for o, n, size in zip(box.offset, box.shape, local.shape, strict=True))
            local[cells(box.offset, box.shape)] += 1
        assert local.max(initial=0) <= 1


@settings(max_examples=80)
@given(placements())
def test_copies_are_exactly_the_ranks_that_hold_the_same_box(placement: Placement) -> None:
    held = {rank: {(box.start, box.shape) for box in placement.boxes(rank)} for rank in placement.holders}
    for rank in placement.holders:
        for box in placement.boxes(rank):
            assert tuple(box.copies) == tuple(r for r in placement.holders if (box.start, box.shape) in held[r])


@settings(max_examples=80)
@given(placements())
def test_ranks_whose_gradients_add_up_agree_on_each_other_and_hold_copies(placement: Placement) -> None:
    partial = {(rank, box.start): box.partial for rank in placement.holders for box in placement.boxes(rank)}
    for rank in placement.holders:
        for box in placement.boxes(rank):
            assert rank in box.partial
            assert set(box.partial) <= set(box.copies)
            assert all(partial[other, box.start] == box.partial for other in box.partial)


# Flat ranges.


def ranges(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    numel = math.prod(shape)
    return [(start, stop) for start in range(numel + 1) for stop in range(start, numel + 1)]


@pytest.mark.parametrize("shape", [(), (7,), (1, 5), (5, 1), (4, 3), (3, 4), (2, 3, 2), (3, 1, 4)])
def test_flat_boxes_are_the_elements_of_a_flat_range_in_order(shape: tuple[int, ...]) -> None:
    flat = np.arange(math.prod(shape))
    logical = flat.reshape(shape)
    for start, stop in ranges(shape):
        local = np.full(stop - start, -1)
        for box in flat_boxes(shape, start, stop):
            assert box.numel > 0
            (offset,) = box.offset
            local[offset : offset + box.numel] = logical[cells(box.start, box.shape)].ravel()
        assert (local == flat[start:stop]).all(), (start, stop)


def test_a_flat_range_that_begins_and_ends_inside_rows_is_head_middle_and_tail() -> None:
    assert flat_boxes((5, 4), 6, 17) == (
        Box((1, 2), (1, 2), (0,)),
        Box((2, 0), (2, 4), (2,)),
        Box((4, 0), (1, 1), (10,)),
    )
