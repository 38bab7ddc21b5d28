"""Layout words, and the mesh that axes make of a world of ranks."""

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

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


def assert_said(words: Iterable[str], call: Callable[[], object]) -> None:
    """The call is refused, with all of these words."""
    with pytest.raises(UsageError) as caught:
        call()
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


LAYOUT_NAMES = ["tp", "pp", "cp", "ep", "etp", "fsdp", "dp"]


@pytest.mark.parametrize(
    ("word", "strategies", "degrees"),
    [
        ("", [], {}),
        ("etp2ep4", ["ep", "etp", "tp"], {"etp": 2, "ep": 4}),
        ("myzero8", ["my", "zero", "myzero"], {"myzero": 8}),
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
        ("tp0", ["tp"], ["degree of 'tp'", "at least 1", "not 0"]),
        ("tp4 pp2", ["tp", "pp"], ["'tp4 pp2'", "unknown strategy"]),
        ("tp-4", ["tp"], ["'tp-4'", "unknown strategy"]),
    ],
)
def test_a_wrong_layout_word_is_refused_with_what_where_and_remedy(
    word: str, strategies: list[str], said: list[str]
) -> None:
    assert_said(said, lambda: parse_layout(word, strategies))


@given(st.lists(st.sampled_from(LAYOUT_NAMES), unique=True), st.data())
def test_parsing_undoes_writing(names: list[str], data: st.DataObject) -> None:
    degrees = {name: data.draw(st.integers(1, 4096)) for name in names}
    assert parse_layout("".join(f"{name}{degree}" for name, degree in degrees.items()), LAYOUT_NAMES) == degrees


@given(st.integers(1, 20), st.integers(1, 8))
def test_contiguous_parts_are_equal_and_partition_a_dimension(part: int, size: int) -> None:
    parts = [contiguous(part * size, size, index) for index in range(size)]
    assert [index for ranges in parts for held in ranges for index in held] == list(range(part * size))
    assert {sum(map(len, ranges)) for ranges in parts} == {part}


# The mesh by hand.


@pytest.mark.parametrize(
    ("axes", "world_size", "shards"),
    [
        ([], 1, [(0, 1)]),
        ([], 4, [(rank, 4) for rank in range(4)]),
        ([TP, CP, PP], 16, [((rank // 4) % 2, 2) for rank in range(16)]),
        ([dp(2, "dp", 50), dp(3, "fsdp", 40), TP], 12, [(rank // 2, 6) for rank in range(12)]),
    ],
    ids=["one process", "no axes", "tensor ranks read the same", "two axes in the order of ranks"],
)
def test_each_data_parallel_rank_reads_its_part_of_the_batch(
    axes: list[Axis], world_size: int, shards: list[tuple[int, int]]
) -> None:
    mesh = Mesh.of(axes, world_size)
    assert [mesh.batch_shard(rank) for rank in range(world_size)] == shards


def test_the_sparse_view_folds_over_the_ranks_of_the_dense_view() -> None:
    mesh = Mesh.of([TP, CP, PP, EP], 8)
    assert mesh.world_size == 8
    assert [(axis.name, axis.size) for axis in mesh.views["dense"]] == [("pp", 2), ("cp", 2), ("tp", 2)]
    assert [(axis.name, axis.size) for axis in mesh.views["sparse"]] == [("pp", 2), ("ep", 4)]
    assert mesh.coordinates(6) == {"pp": 1, "cp": 1, "tp": 0}
    assert mesh.coordinates(6, "sparse") == {"pp": 1, "ep": 2}
    assert mesh.index(6, "ep") == 2
    groups = {("ep",): range(4, 8), ("cp", "tp"): range(4, 8), ("pp", "ep"): range(8), ("dp", "tp"): (6, 7)}
    assert {names: [*mesh.group(6, *names)] for names in groups} == {names: [*ranks] for names, ranks in groups.items()}
    assert mesh.index(6, "dp") == 0, "an axis that the mesh does not have is a group of one"
    with pytest.raises(ValueError, match=r"tp.*ep|ep.*tp"):
        mesh.group(0, "tp", "ep")


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


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ([Axis("tp", 3)], ["tp=3", "8"]),
        ([TP, Axis("cp", 3, distance=1)], ["tp=2", "cp=3", "6", "8"]),
        ([TP, PP, Axis("ep", 8, views=("sparse",))], ["ep=8", "pp=2", "16", "8"]),
    ],
)
def test_degrees_that_do_not_divide_the_world_are_refused_with_the_numbers(axes: list[Axis], said: list[str]) -> None:
    assert_said(said, lambda: Mesh.of(axes, 8))


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
def test_every_view_covers_the_world_in_order_and_coordinates_invert_it(mesh: Mesh) -> None:
    for view, axes in mesh.views.items():
        assert math.prod(axis.size for axis in axes) == mesh.world_size
        distances = [axis.distance for axis in axes if axis.name in ("tp", "cp", "pp", "ep")]
        assert distances == sorted(distances, reverse=True)
        own = [tuple(mesh.coordinates(rank, view)[axis.name] for axis in axes) for rank in range(mesh.world_size)]
        assert [grid(mesh, view)[one] for one in own] == [*range(mesh.world_size)]
    shards = [mesh.batch_shard(rank) for rank in range(mesh.world_size)]
    count = shards[0][1]
    assert sorted(shards) == [(index, count) for index in range(count) for _ in range(mesh.world_size // count)]


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


def test_an_axis_that_views_share_varies_slower_than_the_axes_of_one_view() -> None:
    shared = Axis("tp", 2, views=("dense", "sparse"))
    with pytest.raises(ValueError, match=r"tp.*ep|ep.*tp"):
        Mesh.of([shared, Axis("ep", 4, distance=1, views=("sparse",))], 8)


def plugin(**answers: object) -> object:
    """A plugin whose hooks return these."""

    def returning(answer: object) -> object:
        def hook(self: object) -> object:
            return answer

        return hookimpl(hook)

    return type("Plugin", (), {name: returning(answer) for name, answer in answers.items()})()


class NoFields(BaseModel):
    """The section of a family without settings."""


def divided(*axes: Axis, seq_length: int = 8) -> Run:
    """A run of a strategy for each axis."""
    strategies = {f"parallel/{number}": plugin(mesh_axes=[axis]) for number, axis in enumerate(axes)}
    built = dict.fromkeys(("build_model", "build_optimizer", "build_loader"))
    rest = plugin(define_precision=Precision(weights="float32", activations="float32"), **built)
    trainer = {"device": "cpu", "global_batch_size": 8, "micro_batch_size": 1, "base_modules": None}
    config = SimpleNamespace(
        groups=(),
        chosen=(),
        model=NoFields(),
        parallel=SimpleNamespace(layout="", degrees={axis.name: axis.size for axis in axes}, data=None, rest=None),
        trainer=SimpleNamespace(**trainer, seq_length=seq_length),
        schedule=SimpleNamespace(batch_rampup=SimpleNamespace(start=None)),
        settings={("trainer", "seq_length"): Setting(seq_length, "run.yaml:3")},
    )
    return prepare(config, {**strategies, "test/rest": rest})  # type: ignore[arg-type]


def test_views_need_a_strategy_for_the_rest_and_axes_names_of_their_own() -> None:
    views = "2 ranks in the view 'dense' and 4 ranks in the view 'sparse'"
    assert_said((views, "a run of 4 ranks", "2 times", "parallel.data is null"), lambda: divided(TP, EP))
    with pytest.raises(UsageError, match="parallel/0 and parallel/1 both add an axis 'acme'"):
        divided(Axis("acme", 2), Axis("acme", 4))


ULYS = Axis("ulys", 4, entries={"sequence": contiguous})
STREAM = Axis("tp", 4, activations=("sequence",))


@pytest.mark.parametrize("axes", [(ULYS, STREAM), (STREAM, ULYS)])
def test_the_sequence_is_divided_first_in_the_entries_then_inside_the_model(axes: tuple[Axis, ...]) -> None:
    assert divided(*axes, seq_length=16).mesh.world_size == 16
    words = ("trainer.seq_length (run.yaml:3)", "ulys=4 and tp=4 cannot divide 8", "length 2")
    assert_said(words, lambda: divided(*axes, seq_length=8))
    with pytest.raises(UsageError, match=r"trainer\.seq_length .*: ulys=4 cannot divide 10: .* length 10"):
        divided(ULYS, seq_length=10)


@pytest.mark.parametrize(("said", "ranks", "expected"), [(None, 1, 8), (None, 2, 4), (None, 4, 2), (2, 4, 2)])
def test_by_default_a_micro_batch_is_all_that_a_rank_reads(said: int | None, ranks: int, expected: int) -> None:
    mesh = Mesh.of([Axis("acme", ranks, entries={"batch": contiguous})], ranks)
    config = SimpleNamespace(trainer=SimpleNamespace(micro_batch_size=said, global_batch_size=8))
    assert Run(config, None, mesh, device="cpu").micro_batch_size == expected  # type: ignore[arg-type]
