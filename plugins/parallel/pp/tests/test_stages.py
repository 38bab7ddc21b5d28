"""Dividing units into stages: as light as brute force finds, as the user says, or refused."""

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mplug_gpt import GPT
from mplug_pp import PipelineParallel
from mplug_pp.stages import _times, divide, lightest

from mplug import Mesh, Model, UsageError
from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.model.build import build_model
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run


def cuts(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every division of a list of `number` into contiguous, non-empty parts, as lengths."""
    for inner in combinations(range(1, number), parts - 1):
        ends = (0, *inner, number)
        yield tuple(stop - start for start, stop in pairwise(ends))


def sums(weights: list[int], lengths: tuple[int, ...]) -> list[int]:
    remaining = iter(weights)
    return [sum(next(remaining) for _ in range(length)) for length in lengths]


def working(weights: list[int], parts: int) -> list[tuple[int, ...]]:
    """The divisions in which every part weighs something."""
    return [lengths for lengths in cuts(len(weights), parts) if all(sums(weights, lengths))]


# Lightest.


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_no_division_is_lighter_than_the_one_found(weights: list[int], parts: int) -> None:
    possible = working(weights, parts)
    if not possible:
        return
    found = lightest(weights, parts)
    assert found in possible
    assert max(sums(weights, found)) == min(max(sums(weights, lengths)) for lengths in possible)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 4))
def test_among_equally_light_divisions_the_evenest_is_found(weights: list[int], parts: int) -> None:
    possible = working(weights, parts)
    if not possible:
        return

    def cost(lengths: tuple[int, ...]) -> tuple[int, int]:
        own = sums(weights, lengths)
        return max(own), sum(weight * weight for weight in own)

    assert cost(lightest(weights, parts)) == min(map(cost, possible))


@pytest.mark.parametrize(
    ("weights", "parts", "lengths"),
    [
        ([1, 1, 1, 1], 2, (2, 2)),
        ([1, 1, 1, 1], 4, (1, 1, 1, 1)),
        ([5, 1, 1, 1], 2, (1, 3)),
        ([0, 1, 1], 2, (2, 1)),
        ([1, 1, 0], 2, (1, 2)),
        ([3, 3, 3, 3, 3], 2, (2, 3)),
        ([2, 3, 4, 5, 6], 3, (2, 2, 1)),
        ([7], 1, (1,)),
    ],
)
def test_divisions_that_are_found_by_hand(weights: list[int], parts: int, lengths: tuple[int, ...]) -> None:
    assert lightest(weights, parts) == lengths


# Models.


def gpt(**fields: Any) -> Model:
    with torch.device("meta"):
        return GPT(GPT.Config(**fields)).build_model()


def small(num_layers: int = 4, **fields: Any) -> Model:
    return gpt(num_layers=num_layers, hidden_size=16, num_attention_heads=2, vocab_size=192, **fields)


def lengths_of(stages: tuple[tuple[str, ...], ...]) -> list[int]:
    return [len(units) for units in stages]


def test_an_embedding_costs_nothing_and_shares_a_stage_and_a_head_costs_its_projection() -> None:
    """A block weighs 12 D^2 = 3072, and the head V D = 3072: five that weigh alike."""
    model = small()
    assert [model.unit_weight(unit.name) for unit in model.plan.units] == [0, 3072, 3072, 3072, 3072, 3072]
    assert divide(model, 5, "weights") == (
        ("embedding", "blocks.0"),
        ("blocks.1",),
        ("blocks.2",),
        ("blocks.3",),
        ("head",),
    )


def test_predicted_times_are_those_worked_out_by_hand() -> None:
    """Of a block 6 x 3072 for its weights, and 6 S D = 6 x 128 x 16 for causal attention: 2 x 2 S D, thrice, halved.

    Of the head 6 V D, and 200 FLOPs for each of 16 V bytes.
    """
    assert _times(small(), 128) == [0, *[6 * 3072 + 6 * 128 * 16] * 4, 6 * 192 * 16 + 200 * 16 * 192]


@pytest.mark.parametrize("given_counts", [(1, 5), (3, 3), (5, 1), (1, 1, 1, 3)])
def test_a_user_may_say_how_many_units_each_stage_has(given_counts: tuple[int, ...]) -> None:
    model = small()
    stages = divide(model, len(given_counts), given_counts)
    assert lengths_of(stages) == list(given_counts)
    assert [name for units in stages for name in units] == [unit.name for unit in model.plan.units]


@pytest.mark.parametrize("given_counts", [(3, 2), (3, 4)])
def test_numbers_that_do_not_add_up_to_the_units_are_refused(given_counts: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=rf"split sums to {sum(given_counts)}, and the model has 6 units"):
        divide(small(), 2, given_counts)


def test_more_stages_than_units_that_compute_are_refused() -> None:
    assert lengths_of(divide(small(num_layers=2), 3, "weights")) == [2, 1, 1]
    with pytest.raises(UsageError, match="pp=4 is too large: only 3 units of the model have weights that compute"):
        divide(small(num_layers=2), 4, "weights")


PRESETS = [
    ("nano", 2),
    ("nano", 4),
    ("125m", 2),
    ("125m", 4),
    ("125m", 6),
    ("1.7b", 8),
    ("7.1b", 4),
    ("70b", 8),
    ("175b", 8),
    ("175b", 12),
    ("462b", 16),
]


@pytest.fixture(scope="module")
def presets() -> dict[str, Model]:
    return {name: gpt(**GPT.presets[name]["model"]) for name in {name for name, _ in PRESETS}}


@pytest.mark.parametrize(("preset", "num_stages"), PRESETS)
def test_no_stage_of_a_preset_weighs_more_than_it_must(presets: dict[str, Model], preset: str, num_stages: int) -> None:
    """The lower bound by filling stages up to a limit, greedily: the least limit that needs no more stages."""
    model = presets[preset]
    weights = [model.unit_weight(unit.name) for unit in model.plan.units]
    stages = divide(model, num_stages, "weights")
    heaviest = max(sum(model.unit_weight(name) for name in units) for units in stages)
    limits = sorted({sum(weights[i:j]) for i in range(len(weights)) for j in range(i + 1, len(weights) + 1)})
    assert heaviest == next(limit for limit in limits if needed(weights, limit) <= num_stages)
    assert stages[0][:2] == ("embedding", "blocks.0")
    assert stages[-1][-1] == "head"
    assert all(any(model.unit_weight(name) for name in units) for units in stages)


def needed(weights: list[int], limit: int) -> float:
    """The fewest stages of at most `limit`."""
    stages, held = 1, 0
    for weight in weights:
        if weight > limit:
            return float("inf")
        if held + weight > limit:
            stages, held = stages + 1, 0
        held += weight
    return stages


# Whole runs.

SMALL_RUN = ["model.num_layers=4", "model.hidden_size=32", "model.num_attention_heads=2", "trainer.device=cpu"]


def prepared(*assignments: str) -> Run:
    config = resolve(Registry(), default_settings(), read_assignments([*SMALL_RUN, *assignments]))
    return prepare(config)


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_keeps_the_units_of_its_stage_under_their_global_names(rank: int) -> None:
    run = prepared("parallel.layout=pp2", "parallel.pp.split=[2, 4]")
    run.rank = rank
    model = build_model(run)
    wanted = [("embedding", "blocks.0"), ("blocks.1", "blocks.2", "blocks.3", "head")][rank]
    assert tuple(unit.name for unit in model.own_units) == wanted
    assert {name.split(".mlp")[0] for name in model.parameters() if ".mlp.up.weight" in name} == {
        name for name in wanted if name.startswith("blocks")
    }


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["parallel.layout=pp2", "parallel.pp.split=[1, 2, 3]"], "has 3 numbers, and pp=2 has 2 stages"),
        (["parallel.layout=pp2", "parallel.pp.split=[0, 6]"], r"split.*must be greater than 0"),
        (["parallel.layout=pp2", "parallel.pp.schedule=zb-v1"], "no pipeline schedule 'zb-v1' .*; did you mean 'zb-v'"),
    ],
)
def test_a_wrong_division_is_refused_before_anything_is_built(assignments: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        prepared(*assignments)


def test_by_layers_a_chunk_has_as_many_blocks_as_another_whatever_the_head_weighs() -> None:
    model = small(num_layers=4)  # the head weighs as much as a block
    assert lengths_of(divide(model, 2, "weights")) == [3, 3]
    assert divide(model, 2, "layers") == (("embedding", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "head"))
    with pytest.raises(UsageError, match=r"pp=2 with 3 chunks per rank is too large: only 4 units of"):
        divide(model, 2, "layers", chunks=3)


def test_by_time_attention_and_the_loss_count() -> None:
    """The loss makes a narrow head slower than its weights say, and long sequences make blocks slower."""
    model = small(num_layers=6)  # the head has as many weights as a block
    assert lengths_of(divide(model, 2, "weights")) == [4, 4]
    assert lengths_of(divide(model, 2, "time", seq_length=1)) == [7, 1]
    assert lengths_of(divide(model, 2, "time", seq_length=1 << 20)) == [4, 4]


def test_chunks_are_numbered_in_the_order_of_the_model_and_belong_to_the_ranks_of_the_schedule() -> None:
    words = ["model.num_layers=6", "parallel.layout=pp2", "parallel.pp.split=[1, 3, 2, 2]"]
    for schedule, own in (("interleaved", [(0, 2), (1, 3)]), ("zb-v", [(0, 3), (1, 2)])):
        for rank in range(2):
            run = prepared(*words, f"parallel.pp.schedule={schedule}")
            run.rank = rank
            model = build_model(run)
            assert lengths_of(model.stages.units) == [1, 3, 2, 2]
            assert model.own_chunks == own[rank]
            names = [name for chunk in own[rank] for name in model.stages.units[chunk]]
            assert [unit.name for unit in model.own_units] == names


def test_a_tied_parameter_is_summed_over_ranks_only_if_two_ranks_have_it() -> None:
    """In the shape of a V, the embedding and the head are on rank 0."""
    words = ["parallel.layout=pp2", "model.tie_embeddings=true"]
    for schedule, stages in (("interleaved", (0, 1)), ("zb-v", (0,))):
        model = build_model(prepared(*words, f"parallel.pp.schedule={schedule}"))
        ((first, *_),) = model.plan.tied
        placement = model.placements[first]
        assert placement.stages == stages
        assert ("pp" in placement.partial_axes) is (len(stages) > 1)


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["parallel.pp.schedule=zb-v", "parallel.pp.chunks=3"], "'zb-v' .mplug-pp .*has 2 chunks per rank, not 3"),
        (["parallel.pp.limit=2"], "the schedule '1f1b' takes no memory limit; use 'zb-limited'"),
        (
            ["parallel.pp.schedule=interleaved", "parallel.pp.split=[3, 3]"],
            "2 numbers, and the pipeline has 4 chunks",
        ),
    ],
)
def test_settings_that_a_schedule_does_not_serve_are_refused(assignments: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build_model(prepared("parallel.layout=pp2", *assignments))


def test_stages_are_one_axis_that_all_views_share() -> None:
    config = prepared("parallel.layout=pp4").config
    (axis,) = PipelineParallel(PipelineParallel.Config()).mesh_axes(config=config)
    assert (axis.name, axis.size, axis.splits, dict(axis.entries)) == ("pp", 4, (), {})
    assert tuple(Mesh.of([axis], 4).group(0, "pp")) == (0, 1, 2, 3)
