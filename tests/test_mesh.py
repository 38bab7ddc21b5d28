"""Layout words, and the mesh that axes make of a world of ranks."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mplug import Axis, Mesh, Precision, UsageError, contiguous, hookimpl
from mplug.config.sources import Setting
from mplug.layout.mesh import parse_layout
from mplug.run.prepare import prepare
from mplug.run.run import Run

TP = Axis("tp", 2, splits=("heads", "mlp"))
CP = Axis("cp", 2, entries={"sequence": contiguous}, distance=1)
PP = Axis("pp", 2, distance=100, views=("dense", "sparse"))
EP = Axis("ep", 4, splits=("expert",), views=("sparse",))


def dp(size: int, name: str = "dp", distance: int = 50) -> Axis:
    return Axis(name, size, entries={"batch": contiguous}, distance=distance)


# Layout words.


@pytest.mark.parametrize(
    ("word", "strategies", "degrees"),
    [
        ("", ["tp"], {}),
        ("", [], {}),
        ("tp4pp2", ["tp", "pp"], {"tp": 4, "pp": 2}),
        ("pp2tp4", ["tp", "pp"], {"pp": 2, "tp": 4}),
        ("tp2cp2pp2ep4", ["cp", "ep", "etp", "pp", "tp"], {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
        ("etp2ep4", ["ep", "etp", "tp"], {"etp": 2, "ep": 4}),
        ("dp128", ["dp"], {"dp": 128}),
        ("myzero8", ["my", "zero", "myzero"], {"myzero": 8}),
        ("dp2fsdp4tp2", ["dp", "fsdp", "tp"], {"dp": 2, "fsdp": 4, "tp": 2}),
        ("tp24", ["tp", "tp2"], {"tp2": 4}),
        ("tp2dp4", ["tp", "dp", "tp2d"], {"tp": 2, "dp": 4}),
        ("tp2d4", ["tp", "d", "tp2d"], {"tp2d": 4}),
        ("acme-zero3tp2", ["acme-zero", "tp"], {"acme-zero": 3, "tp": 2}),
    ],
)
def test_a_layout_word_is_names_with_degrees_the_longest_name_first(
    word: str, strategies: list[str], degrees: dict[str, int]
) -> None:
    assert parse_layout(word, strategies) == degrees


@pytest.mark.parametrize(
    ("word", "strategies", "said"),
    [
        ("fspd4", ["fsdp", "tp"], ["'fspd4'", "unknown strategy 'fspd'", "did you mean 'fsdp'", "fsdp and tp"]),
        ("tp4xy2", ["tp", "pp"], ["'tp4xy2'", "unknown strategy 'xy'", "installed: pp and tp"]),
        ("tp4", [], ["unknown strategy 'tp'", "installed: none"]),
        ("tp", ["tp"], ["'tp' needs a degree", "'tp2'"]),
        ("pp2tp", ["tp", "pp"], ["'pp2tp'", "'tp' needs a degree"]),
        ("4tp", ["tp"], ["'4tp'", "does not begin with a strategy's name"]),
        ("4", [], ["'4'", "does not begin with a strategy's name"]),
        ("tp0", ["tp"], ["degree of 'tp'", "at least 1", "not 0"]),
        ("tp2pp2tp4", ["tp", "pp"], ["'tp2pp2tp4'", "'tp' twice"]),
        ("tp4 pp2", ["tp", "pp"], ["'tp4 pp2'", "unknown strategy"]),
        ("tp-4", ["tp"], ["'tp-4'", "unknown strategy"]),
    ],
)
def test_a_wrong_layout_word_is_refused_with_what_where_and_remedy(
    word: str, strategies: list[str], said: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        parse_layout(word, strategies)
    for words in said:
        assert words in str(caught.value)


@given(
    st.lists(st.sampled_from(["tp", "pp", "cp", "ep", "etp", "fsdp", "dp"]), unique=True),
    st.data(),
)
def test_parsing_undoes_writing(names: list[str], data: st.DataObject) -> None:
    degrees = {name: data.draw(st.integers(1, 4096)) for name in names}
    word = "".join(f"{name}{degree}" for name, degree in degrees.items())
    assert parse_layout(word, ["tp", "pp", "cp", "ep", "etp", "fsdp", "dp"]) == degrees


# Index maps.


@given(st.integers(1, 20), st.integers(1, 8))
def test_contiguous_parts_are_equal_and_partition_a_dimension(part: int, size: int) -> None:
    parts = [contiguous(part * size, size, index) for index in range(size)]
    assert [index for ranges in parts for held in ranges for index in held] == list(range(part * size))
    assert {sum(map(len, ranges)) for ranges in parts} == {part}


# The mesh by hand.


def test_without_axes_a_world_is_one_data_axis() -> None:
    mesh = Mesh.of([], 4)
    assert [mesh.batch_shard(rank) for rank in range(4)] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert Mesh.of([], 1).batch_shard(0) == (0, 1)


def test_the_nearest_axis_varies_fastest_whatever_the_order_of_the_plugins() -> None:
    for axes in ([TP, CP, PP], [PP, CP, TP], [CP, TP, PP]):
        mesh = Mesh.of(axes, 8)
        assert [axis.name for axis in mesh.views["dense"]] == ["pp", "cp", "tp"]
        assert mesh.coordinates(5) == {"pp": 1, "cp": 0, "tp": 1}
        assert [mesh.index(5, name) for name in ("pp", "cp", "tp")] == [1, 0, 1]
        assert tuple(mesh.group(5, "tp")) == (4, 5)
        assert tuple(mesh.group(5, "cp")) == (5, 7)
        assert tuple(mesh.group(5, "pp")) == (1, 5)
        assert tuple(mesh.group(5, "tp", "pp")) == (0, 1, 4, 5)


def test_the_sparse_view_folds_over_the_ranks_of_the_dense_view() -> None:
    mesh = Mesh.of([TP, CP, PP, EP], 8)
    assert mesh.world_size == 8
    assert [(axis.name, axis.size) for axis in mesh.views["dense"]] == [("pp", 2), ("cp", 2), ("tp", 2)]
    assert [(axis.name, axis.size) for axis in mesh.views["sparse"]] == [("pp", 2), ("ep", 4)]
    assert mesh.coordinates(6) == {"pp": 1, "cp": 1, "tp": 0}
    assert mesh.coordinates(6, "sparse") == {"pp": 1, "ep": 2}
    assert mesh.index(6, "ep") == 2
    assert tuple(mesh.group(6, "ep")) == (4, 5, 6, 7)
    assert tuple(mesh.group(6, "cp", "tp")) == (4, 5, 6, 7)
    assert tuple(mesh.group(6, "pp", "ep")) == tuple(range(8))


def test_ranks_that_are_left_are_a_data_axis_between_the_stages_and_the_rest_in_each_view() -> None:
    mesh = Mesh.of([TP, CP, PP, EP], 16)
    assert [axis.size for axis in mesh.views["dense"]] == [2, 2, 2, 2]
    assert [axis.size for axis in mesh.views["sparse"]] == [2, 2, 4]
    data, sparse_data = mesh.views["dense"][1].name, mesh.views["sparse"][1].name
    assert data != sparse_data
    assert tuple(mesh.group(5, data)) == (1, 5)
    assert tuple(mesh.group(5, sparse_data)) == (1, 5)
    assert tuple(mesh.group(5, "ep")) == (4, 5, 6, 7)
    assert tuple(mesh.group(5, "pp")) == (5, 13)


def test_each_data_parallel_rank_reads_its_part_of_the_batch_and_its_tensor_ranks_read_the_same() -> None:
    mesh = Mesh.of([TP, CP, PP], 16)
    assert [mesh.batch_shard(rank) for rank in range(16)] == [((rank // 4) % 2, 2) for rank in range(16)]


def test_two_axes_that_split_the_batch_number_its_parts_in_the_order_of_ranks() -> None:
    mesh = Mesh.of([dp(2, "dp", 50), dp(3, "fsdp", 40), TP], 12)
    assert [mesh.batch_shard(rank) for rank in range(12)] == [(rank // 2, 6) for rank in range(12)]


def test_an_axis_that_the_mesh_does_not_have_is_a_group_of_one() -> None:
    mesh = Mesh.of([TP], 2)
    assert tuple(mesh.group(1, "pp")) == (1,)
    assert mesh.index(1, "pp") == 0
    assert tuple(mesh.group(1, "pp", "tp")) == (0, 1)


def test_axes_of_different_views_make_no_group() -> None:
    with pytest.raises(ValueError, match=r"tp.*ep|ep.*tp"):
        Mesh.of([TP, CP, PP, EP], 8).group(0, "tp", "ep")


@pytest.mark.parametrize(
    ("axes", "world_size", "said"),
    [
        ([Axis("tp", 3)], 8, ["tp=3", "8"]),
        ([Axis("tp", 16)], 8, ["tp=16", "8"]),
        ([TP, Axis("cp", 3, distance=1)], 8, ["tp=2", "cp=3", "6", "8"]),
        ([TP, PP, Axis("ep", 8, views=("sparse",))], 8, ["ep=8", "pp=2", "16", "8"]),
    ],
)
def test_degrees_that_do_not_divide_the_world_are_refused_with_the_numbers(
    axes: list[Axis], world_size: int, said: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        Mesh.of(axes, world_size)
    for words in said:
        assert words in str(caught.value)


# The mesh as a property, against an array of ranks reshaped to the degrees.

DEGREES = st.sampled_from([1, 2, 3, 4])


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    tp, cp, pp, data = (draw(DEGREES) for _ in range(4))
    world_size = tp * cp * pp * data
    near = draw(st.booleans())  # whether context ranks sit nearer than tensor ranks
    axes = [Axis("tp", tp, distance=1), Axis("cp", cp, distance=0 if near else 2)]
    axes.append(Axis("pp", pp, distance=9, views=("dense", "sparse")))
    ep = draw(st.sampled_from([n for n in range(1, tp * cp * data + 1) if (tp * cp * data) % n == 0]))
    axes.append(Axis("ep", ep, views=("sparse",)))
    return Mesh.of(draw(st.permutations(axes)), world_size)


def grid(mesh: Mesh, view: str) -> np.ndarray:
    """Ranks in an array with one dimension an axis of the view."""
    return np.arange(mesh.world_size).reshape([axis.size for axis in mesh.views[view]])


@settings(max_examples=60)
@given(meshes())
def test_every_view_covers_the_world_and_is_sorted_from_far_to_near(mesh: Mesh) -> None:
    for axes in mesh.views.values():
        assert math.prod(axis.size for axis in axes) == mesh.world_size
        distances = [axis.distance for axis in axes if axis.name in ("tp", "cp", "pp", "ep")]
        assert distances == sorted(distances, reverse=True)


@settings(max_examples=60)
@given(meshes())
def test_coordinates_invert(mesh: Mesh) -> None:
    for view, axes in mesh.views.items():
        ranks = grid(mesh, view)
        for rank in range(mesh.world_size):
            own = mesh.coordinates(rank, view)
            assert ranks[tuple(own[axis.name] for axis in axes)] == rank


@settings(max_examples=60)
@given(meshes(), st.data())
def test_groups_partition_the_ranks(mesh: Mesh, data: st.DataObject) -> None:
    view = data.draw(st.sampled_from(sorted(mesh.views)))
    names = [axis.name for axis in mesh.views[view]]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    groups = {mesh.group(rank, *chosen) for rank in range(mesh.world_size)}
    kept = [dim for dim, name in enumerate(names) if name not in chosen]
    moved = np.moveaxis(grid(mesh, view), kept, range(len(kept)))
    expected = moved.reshape(math.prod(moved.shape[: len(kept)]), -1)
    assert {tuple(ranks) for ranks in groups} == {tuple(sorted(row)) for row in expected.tolist()}
    assert set(mesh.grouping(*chosen).all()) == groups
    assert all(rank in mesh.group(rank, *chosen) for rank in range(mesh.world_size))


@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_views_agree_on_a_shared_axis_that_is_near_or_refuse_it(world_size: int) -> None:
    shared = Axis("tp", 2, views=("dense", "sparse"))
    try:
        mesh = Mesh.of([shared, Axis("ep", 4, distance=1, views=("sparse",))], world_size)
    except (UsageError, ValueError):
        return
    for rank in range(mesh.world_size):
        assert mesh.coordinates(rank, "dense")["tp"] == mesh.coordinates(rank, "sparse")["tp"]


@settings(max_examples=60)
@given(meshes())
def test_batch_shards_have_the_same_number_of_ranks_each(mesh: Mesh) -> None:
    shards = [mesh.batch_shard(rank) for rank in range(mesh.world_size)]
    counts = {count for _, count in shards}
    assert len(counts) == 1
    count = counts.pop()
    each = [sum(index == shard for shard, _ in shards) for index in range(count)]
    assert each == [mesh.world_size // count] * count


# The world that a layout makes.


class Divider:
    """A strategy of one axis."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    @hookimpl
    def mesh_axes(self) -> list[Axis]:
        return [self.axis]


class Rest:
    """Everything else that a run needs."""

    @hookimpl
    def define_precision(self) -> Precision:
        return Precision(weights="float32", activations="float32")

    @hookimpl
    def build_model(self) -> None: ...

    @hookimpl
    def build_optimizer(self) -> None: ...

    @hookimpl
    def build_loader(self) -> None: ...


def divided(*axes: Axis, seq_length: int = 8) -> Run:
    """A run of a strategy for each axis."""
    strategies: dict[str, object] = {f"parallel/{number}": Divider(axis) for number, axis in enumerate(axes)}
    config = SimpleNamespace(
        chosen=(),
        parallel=SimpleNamespace(layout="", degrees={axis.name: axis.size for axis in axes}, data=None, rest=None),
        trainer=SimpleNamespace(
            device="cpu", global_batch_size=8, micro_batch_size=1, seq_length=seq_length, base_modules=None
        ),
        schedule=SimpleNamespace(batch_rampup=SimpleNamespace(start=None)),
        settings={("trainer", "seq_length"): Setting(seq_length, "run.yaml:3")},
    )
    return prepare(config, {**strategies, "test/rest": Rest()})  # type: ignore[arg-type]


def test_views_whose_degrees_differ_need_a_data_parallel_strategy_for_the_rest() -> None:
    with pytest.raises(UsageError) as caught:
        divided(TP, EP)
    for words in (
        "2 ranks in the view 'dense' and 4 ranks in the view 'sparse'",
        "a run of 4 ranks",
        "2 times",
        "parallel.data is null",
    ):
        assert words in str(caught.value)


def test_two_axes_of_one_name_are_refused_naming_both_strategies() -> None:
    with pytest.raises(UsageError, match="parallel/0 and parallel/1 both add an axis 'acme'"):
        divided(Axis("acme", 2), Axis("acme", 4))


ULYS = Axis("ulys", 4, entries={"sequence": contiguous})
STREAM = Axis("tp", 4, activations=("sequence",))


@pytest.mark.parametrize("axes", [(ULYS, STREAM), (STREAM, ULYS)])
def test_the_sequence_is_divided_first_in_the_entries_then_inside_the_model(axes: tuple[Axis, ...]) -> None:
    assert divided(*axes, seq_length=16).mesh.world_size == 16
    with pytest.raises(UsageError) as caught:
        divided(*axes, seq_length=8)
    for words in ("trainer.seq_length (run.yaml:3)", "ulys=4 and tp=4 cannot divide 8", "length 2"):
        assert words in str(caught.value)


def test_a_sequence_that_an_index_map_refuses_is_refused_before_anything_is_built() -> None:
    with pytest.raises(UsageError, match=r"trainer\.seq_length .*: ulys=4 cannot divide 10: .* length 10"):
        divided(ULYS, seq_length=10)


@pytest.mark.parametrize(("said", "ranks", "expected"), [(None, 1, 8), (None, 2, 4), (None, 4, 2), (2, 4, 2)])
def test_by_default_a_micro_batch_is_all_that_a_rank_reads(said: int | None, ranks: int, expected: int) -> None:
    mesh = Mesh.of([Axis("acme", ranks, entries={"batch": contiguous})], ranks)
    config = SimpleNamespace(trainer=SimpleNamespace(micro_batch_size=said, global_batch_size=8))
    assert Run(config, None, mesh, device="cpu").micro_batch_size == expected  # type: ignore[arg-type]
