"""Streams: rows of other kinds than tokens are checked, counted, padded, and their FLOPs belong to their units."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_tower import SEEING

from mplug import Axis, Mesh, Plan, Stream, Unit, UsageError
from mplug.layout.work import Flops
from mplug.model.build import build_model
from mplug.training.batch_parts import own_part
from mplug_graphs.obstacles import step_obstacles
from mplug_streams.rows import count_rows, malformed_streams
from mplug_testing.harness import tiny_run

PLAN = Plan(
    units=(Unit("tower", ("rows", "bounds"), ("seen",), sequence="glyphs"),),
    parameters={},
    context={"rows": ("packs", "glyphs", "width"), "bounds": ("packs", "marks"), "places": ("batch", "sequence")},
    activations={"seen": ("packs", "glyphs", "embed")},
    flops=Flops(0, 0),
    streams={"glyphs": Stream(("bounds",), group=2)},
)
"""A stream of glyphs, two of which are one row of what follows."""


def batch(rows: int, *lengths: int) -> dict[str, Any]:
    return {"rows": torch.arange(3.0 * rows).view(1, rows, 3), "bounds": torch.tensor([lengths])}


def test_rows_and_squares_are_counted_without_padding_of_lengths() -> None:
    assert count_rows(batch(8, 2, 6, 0), PLAN) == {"bounds": (8, 40)}


@pytest.mark.parametrize(("ranks", "added"), [(1, 0), (2, 1), (3, 3), (4, 5)])
def test_copies_of_the_last_group_fill_the_ranks_of_sequence_parallelism(ranks: int, added: int) -> None:
    """Every rank has at least two groups."""
    mesh = Mesh.of([Axis("tp", ranks, activations=("sequence",))], ranks)
    whole = batch(6, 4, 2)
    own = own_part(whole, PLAN, mesh, ranks - 1)
    last = whole["rows"][:, -2:]
    assert torch.equal(own["rows"], torch.cat((whole["rows"], *[last] * added), dim=1))
    assert own["bounds"].tolist() == [[4, 2, *[2] * added]]


def test_a_process_has_at_least_two_groups_and_two_lengths() -> None:
    mesh = Mesh.of([], 1)
    one = own_part(batch(2, 2), PLAN, mesh, 0)
    assert one["rows"].shape == (1, 4, 3)
    assert one["bounds"].tolist() == [[2, 2]]
    assert own_part(batch(6, 6), PLAN, mesh, 0)["bounds"].tolist() == [[6, 0]]


@pytest.mark.parametrize(
    ("rank", "numbers", "lines"),
    [
        (0, [[3, 4], [5, -1], [1, 2]], [[1, 2]]),
        (1, [[3, 4], [5, -1], [1, 2]], [[0, 1], [2, -1]]),
        (1, [[0, 2]], [[-1, -1]]),
    ],
)
def test_a_rank_has_the_lines_of_its_own_groups_with_its_own_numbers(
    rank: int, numbers: list[list[int]], lines: list[list[int]]
) -> None:
    """The segment of 6 rows, three groups, is on the first rank; those of 4 and 2 are on the second."""
    stream = Stream(("bounds",), group=2, indices=("of_sample",), own=("of_share",))
    plan = replace(PLAN, context={**PLAN.context, "of_sample": ("batch", "most")}, streams={"glyphs": stream})
    mesh = Mesh.of([Axis("cp", 2, shares_streams=True)], 2)
    whole = {**batch(12, 6, 4, 2), "of_sample": torch.tensor(numbers)}
    own = own_part(whole, plan, mesh, rank)
    assert own["bounds"].tolist() == [[[6, 0], [4, 2]][rank]]
    assert own["of_share"].tolist() == lines


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (batch(5, 5), "'rows' has 5 rows of glyphs; the number must be a multiple of 2, and not 0"),
        (batch(0), "'rows' has 0 rows of glyphs; the number must be a multiple of 2, and not 0"),
        (batch(6, 4), "'bounds' sums to 4; it must have the lengths of segments of 6 glyphs"),
        (batch(6, 8, -2), "'bounds' sums to 6; it must have the lengths of segments of 6 glyphs"),
        ({**batch(2, 2), "bounds": torch.tensor([2])}, r"'bounds' \(1,\) of torch.int64 must be \[1, N\] of int64"),
    ],
)
def test_entries_that_contradict_one_another_are_refused(wrong: dict[str, Any], words: str) -> None:
    assert not malformed_streams(batch(6, 4, 2), PLAN)
    with pytest.raises(UsageError, match=words):
        raise UsageError(malformed_streams(wrong, PLAN))


def test_a_unit_of_a_stream_that_the_plan_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="computes rows along 'glyphs', and the plan has no such stream"):
        replace(PLAN, streams={})


def test_the_flops_of_a_stream_are_those_of_its_units() -> None:
    model = build_model(tiny_run(SEEING))
    text = build_model(tiny_run({**SEEING, "model.vision": None, "data.media": 0}))
    assert model.flops == text.flops
    weights = {n: p.numel() for n, p in model.parameters().items() if n.startswith("tower") and p.dim() == 2}
    merged = sum(number for name, number in weights.items() if "merger" in name)
    per_patch = 6 * (sum(weights.values()) - merged) + 6 * merged // 4
    (found,) = (one.flops for one in model.stream_passes.values())
    assert found.per_token == per_patch
    blocks, heads, width = 2, 2, 8
    assert found.per_squared_length == blocks * 6 * heads * 2 * width  # patches see one another


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data.media": 0}, "data/mock have no 'patches', .*supplies images .*--set data.media=2"),
        ({"model.vision": None}, "data/mock supplies samples with media, and models/qwen-vl takes none"),
    ],
)
def test_a_loader_and_a_model_must_agree_about_streams(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_model(tiny_run({**SEEING, **settings}))


def test_a_loader_that_supplies_a_part_of_the_entries_is_refused() -> None:
    """Also one that units may omit: tokens would then have other positions."""
    run = tiny_run(SEEING)
    run.entries -= {"coordinates"}
    with pytest.raises(UsageError, match="data/mock have no 'coordinates', which models/qwen-vl needs for its patches"):
        build_model(run)


def test_no_graph_replays_a_step_with_a_stream() -> None:
    run = tiny_run(SEEING)
    model = build_model(run)
    run.device = "cuda"
    assert "the number of patches differs from micro batch to micro batch" in step_obstacles(run, model)
