"""Dividing units into stages: as light as brute force finds, as the user says, or refused."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout_runs import assert_refused, under
from mplug_gpt import GPT
from mplug_pp.stages import _times, divide, lightest

from mplug import Model, UsageError
from mplug.model.build import build_model
from mplug_testing.harness import tiny_run


def cuts(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every division of a list of `number` into contiguous, non-empty parts, as lengths."""
    for inner in combinations(range(1, number), parts - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *inner, number)))


def sums(weights: list[int], lengths: tuple[int, ...]) -> list[int]:
    remaining = iter(weights)
    return [sum(next(remaining) for _ in range(length)) for length in lengths]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_the_division_found_is_the_lightest_and_of_these_the_evenest(weights: list[int], parts: int) -> None:
    def cost(lengths: tuple[int, ...]) -> tuple[int, int]:
        own = sums(weights, lengths)
        return max(own), sum(weight * weight for weight in own)

    possible = [lengths for lengths in cuts(len(weights), parts) if all(sums(weights, lengths))]
    if possible:  # every part weighs something
        found = lightest(weights, parts)
        assert found in possible
        assert cost(found) == min(map(cost, possible))


@pytest.mark.parametrize(
    ("weights", "parts", "lengths"),
    [([0, 1, 1], 2, (2, 1)), ([1, 1, 0], 2, (1, 2)), ([3, 3, 3, 3, 3], 2, (2, 3)), ([2, 3, 4, 5, 6], 3, (2, 2, 1))],
)
def test_divisions_that_are_found_by_hand(weights: list[int], parts: int, lengths: tuple[int, ...]) -> None:
    assert lightest(weights, parts) == lengths


# Models.


def gpt(**fields: Any) -> Model:
    """A model whose plan has the work of its units, collected once, as the host adds it before it divides a model."""
    with torch.device("meta"):
        model = GPT(GPT.Config(**fields)).build_model()
    model.plan = replace(model.plan, work=model.work)
    return model


def small(num_layers: int = 4) -> Model:
    """A block weighs 12 D^2 = 3072, and the head V D = 3072."""
    return gpt(num_layers=num_layers, hidden_size=16, num_attention_heads=2, vocab_size=192)


def lengths_of(stages: tuple[tuple[str, ...], ...]) -> list[int]:
    return [len(units) for units in stages]


def test_an_embedding_costs_nothing_and_shares_a_stage_and_a_head_costs_its_projection() -> None:
    model = small()
    assert [model.unit_weight(unit.name) for unit in model.plan.units] == [0, 3072, 3072, 3072, 3072, 3072]
    first, *others = divide(model, 5, "weights")
    assert first == ("embedding", "blocks.0")
    assert others == [("blocks.1",), ("blocks.2",), ("blocks.3",), ("head",)]


def test_predicted_times_are_those_worked_out_by_hand() -> None:
    """Of a block 6 x 3072 for its weights, and 6 S D = 6 x 128 x 16 for causal attention: 2 x 2 S D, thrice, halved.

    Of the head 6 V D, and 200 FLOPs for each of 16 V bytes.
    """
    assert _times(small(), 128) == [0, *[6 * 3072 + 6 * 128 * 16] * 4, 6 * 192 * 16 + 200 * 16 * 192]


def test_a_block_of_an_encoder_takes_the_time_of_its_own_rows() -> None:
    """12 rows beside 16 tokens: 4 D^2 + 3 D F weights, and attention in both directions: 2 x 2 x 12^2 D, thrice."""
    spans = {"data.name": "spans", "data.of": {"name": "mock", "vocab_size": 50}, "data.sentinels": 10}
    spans |= {"data.end_token": 1, "data.encoder_length": 12}
    t5 = {"model.name": "t5", "model.preset": "tiny", "model.vocab_size": 61, "model.encoder_length": 12}
    block = 6 * (4 * 64**2 + 3 * 64 * 128) * 12 // 16 + 12 * 12**2 * 64 // 16
    assert _times(build_model(tiny_run({**t5, **spans})), 16)[:4] == [0, block, block, 0]


@pytest.mark.parametrize("given_counts", [(1, 5), (3, 3), (5, 1), (1, 1, 1, 3)])
def test_a_user_may_say_how_many_units_each_stage_has(given_counts: tuple[int, ...]) -> None:
    model = small()
    stages = divide(model, len(given_counts), given_counts)
    assert lengths_of(stages) == list(given_counts)
    assert [name for units in stages for name in units] == [unit.name for unit in model.plan.units]


@pytest.mark.parametrize(
    ("num_layers", "stages", "by", "chunks", "said"),
    [
        (4, 2, (3, 2), 1, "split sums to 5, and the model has 6 units"),
        (4, 2, (3, 4), 1, "split sums to 7, and the model has 6 units"),
        (2, 4, "weights", 1, "pp=4 is too large: only 3 units of the model have weights that compute"),
        (4, 2, "layers", 3, "pp=2 with 3 chunks per rank is too large: only 4 units of"),
    ],
)
def test_divisions_that_do_not_exist_are_refused(num_layers: int, stages: int, by: Any, chunks: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        divide(small(num_layers), stages, by, chunks=chunks)


def test_by_weights_layers_or_time_another_division_is_even() -> None:
    """The loss makes a narrow head slower than its weights say, and long sequences make blocks slower."""
    assert lengths_of(divide(small(2), 3, "weights")) == [2, 1, 1]
    assert lengths_of(divide(small(4), 2, "weights")) == [3, 3]  # the head weighs as much as a block
    assert divide(small(4), 2, "layers") == (("embedding", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "head"))
    model = small(6)
    assert lengths_of(divide(model, 2, "weights")) == [4, 4]
    assert lengths_of(divide(model, 2, "time", seq_length=1)) == [7, 1]
    assert lengths_of(divide(model, 2, "time", seq_length=1 << 20)) == [4, 4]


PRESETS = {"nano": (2, 4), "125m": (2, 4, 6), "1.7b": (8,), "7.1b": (4,), "70b": (8,), "175b": (8, 12), "462b": (16,)}


@pytest.mark.wide("suites", quick=["nano-4", "nano-2", "125m-4", "1.7b-8", "70b-8"])
@pytest.mark.parametrize(("preset", "num_stages"), [(name, n) for name, numbers in PRESETS.items() for n in numbers])
def test_no_stage_of_a_preset_weighs_more_than_it_must(preset: str, num_stages: int) -> None:
    """The lower bound by filling stages up to a limit, greedily: the least limit that needs no more stages."""
    model = gpt(**GPT.presets[preset]["model"])
    weights = [model.unit_weight(unit.name) for unit in model.plan.units]
    stages = divide(model, num_stages, "weights")
    heaviest = max(sum(model.unit_weight(name) for name in units) for units in stages)
    limits = sorted({sum(weights[i:j]) for i in range(len(weights)) for j in range(i + 1, len(weights) + 1)})
    assert heaviest == next(limit for limit in limits if needed(weights, limit) <= num_stages)
    assert (stages[0][:2], stages[-1][-1]) == (("embedding", "blocks.0"), "head")
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


def built(layout: str, rank: int = 0) -> Model:
    run = tiny_run(under(layout))
    run.rank = rank
    return build_model(run)


@pytest.mark.parametrize(
    ("schedule", "split", "own"),
    [
        ("1f1b", [2, 4], [(0,), (1,)]),
        ("interleaved", [1, 2, 1, 2], [(0, 2), (1, 3)]),
        ("zb-v", [1, 2, 1, 2], [(0, 3), (1, 2)]),
    ],
)
def test_a_rank_keeps_the_units_of_its_chunks_under_their_global_names(
    schedule: str, split: list[int], own: list[tuple[int, ...]]
) -> None:
    """Chunks are numbered in the order of the model, and belong to the ranks of the schedule."""
    for rank in range(2):
        model = built(f"pp2 parallel.pp.schedule={schedule} parallel.pp.split={split}".replace(", ", ","), rank)
        assert lengths_of(model.stages.units) == split
        assert model.own_chunks == own[rank]
        names = [name for chunk in own[rank] for name in model.stages.units[chunk]]
        assert [unit.name for unit in model.own_units] == names
        blocks = {name.split(".mlp")[0] for name in model.parameters() if ".mlp.up.weight" in name}
        assert blocks == {name for name in names if name.startswith("blocks")}


def test_a_tied_parameter_is_summed_over_ranks_only_if_two_ranks_have_it() -> None:
    """In the shape of a V, the embedding and the head are on rank 0."""
    for schedule, stages in (("interleaved", (0, 1)), ("zb-v", (0,))):
        model = built(f"pp2 model.tie_embeddings=true parallel.pp.schedule={schedule}")
        ((first, *_),) = model.plan.tied
        placement = model.placements[first]
        assert placement.stages == stages
        assert ("pp" in placement.partial_axes) is (len(stages) > 1)


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        ("split=[1,2,3]", "has 3 numbers, and pp=2 has 2 stages"),
        ("split=[0,6]", "must be greater than 0"),
        ("schedule=zb-v1", "did you mean 'zb-v'"),
        ("schedule=zb-v chunks=3", "has 2 chunks per rank, not 3"),
        ("limit=2", "the schedule '1f1b' takes no memory limit; use 'zb-limited'"),
        ("schedule=interleaved split=[3,3]", "2 numbers, and the pipeline has 4 chunks"),
    ],
)
def test_settings_that_do_not_fit_are_refused(assignments: str, said: str) -> None:
    assert_refused(" ".join(["pp2", *(f"parallel.pp.{one}" for one in assignments.split())]), {}, said)
