"""Balanced streams: who computes which segments, what travels, and which models and settings are refused."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tower import SEEING

from mplug import RETURNS, Plan, UsageError
from mplug.layout.work import Flops
from mplug.model.build import build_model
from mplug.model.model import Model
from mplug.training.assembly import build
from mplug_streams.conditions import refuse_unbalanced
from mplug_streams.segment_shares import Place, assigned
from mplug_streams.shares import Shares
from mplug_testing.harness import tiny_config, tiny_run
from mplug_testing.workers import run_workers

GROUP = 4
TOWER = Flops(2_500_000_000, 400_000)
"""About that of Qwen3-VL: the products of 27 blocks of width 1152, and their attention."""
MICRO_BATCHES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=5)
"""For each data rank, the groups of its segments."""


def long_tailed(ranks: int, seed: int) -> list[list[int]]:
    """The rows of the pictures of each rank: most are small, few are very large."""
    draw = random.Random(seed)
    return [
        [GROUP * min(4096, max(16, int(draw.lognormvariate(5.5, 1.2)))) for _ in range(draw.randint(8, 24))]
        for _ in range(ranks)
    ]


def work_of(lengths: list[list[int]]) -> list[list[int]]:
    return [[TOWER.of(one, one * one) for one in row] for row in lengths]


def slowest_over_mean(sums: list[int]) -> float:
    return max(sums) * len(sums) / sum(sums)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_ranks_compute_equally_many_rows_of_long_tailed_pictures(ranks: int) -> None:
    for seed in range(20):
        lengths = long_tailed(ranks, seed)
        work = work_of(lengths)
        bins = assigned(work, 1)
        found = slowest_over_mean([sum(work[one.source][one.number] for one in places) for places in bins])
        largest = max(max(row) for row in work)
        mean = sum(map(sum, work)) / ranks
        assert found <= max(1.03, largest / mean)  # no rank can have less than the largest picture
        shares = Shares(lengths, bins, 1, GROUP)
        rows = [shares.rows_in(one) for one in range(ranks)]
        if largest < mean / 2:
            assert slowest_over_mean(rows) <= 1.2
            assert slowest_over_mean(rows) <= slowest_over_mean([sum(row) for row in lengths])


def test_pictures_of_one_size_are_divided_to_within_one() -> None:
    bins = assigned([[7] * 12, [7], [7, 7]], 1)
    assert sorted(map(len, bins)) == [5, 5, 5]


@pytest.mark.parametrize("shares", [1, 2])
def test_equal_micro_batches_stay_where_they_are(shares: int) -> None:
    bins = assigned([[9, 5, 5, 9]] * 3, shares)
    for rank in range(3):
        own = [place for places in bins[rank * shares : (rank + 1) * shares] for place in places]
        assert sorted(own) == [Place(rank, number) for number in range(4)]


@given(MICRO_BATCHES, st.integers(1, 3), st.integers(1, 3))
def test_every_row_is_computed_once_and_its_result_returns_to_its_place(
    groups: list[list[int]], shares: int, splits: int
) -> None:
    lengths = [[GROUP * one for one in row] for row in groups]
    plan = Shares(lengths, assigned(lengths, shares), shares, GROUP, splits)
    ranks = range(len(lengths))
    computed: list[list[Any]] = []  # by data rank, the groups of all its shares as they are gathered
    for rank in ranks:
        computed.append([])
        for share in range(shares):
            arrived = [(source, row) for source in ranks for span in plan.leaving(source, share)[rank] for row in span]
            one = rank * shares + share
            assert [sum(source == sender for sender, _ in arrived) for source in ranks] == plan.arriving(one)
            rows = [*arrived, *[None] * (plan.padding(one) * GROUP)]
            assert rows
            assert len(rows) // GROUP % splits == 0
            computed[rank] += [rows[at : at + GROUP] for at in range(0, len(rows), GROUP)]
    everything = [row for of_rank in computed for found in of_rank for row in found if row is not None]
    assert sorted(everything) == [(source, row) for source in ranks for row in range(sum(lengths[source]))]
    for home in ranks:
        returned = [computed[rank][at] for rank in ranks for at in plan.returned(rank)[home]]
        assert [len(plan.returned(rank)[home]) for rank in ranks] == plan.returning(home)
        ordered = [row for at in plan.order_at_home(home) for row in returned[at]]
        assert ordered == [(home, row) for row in range(sum(lengths[home]))]


def step_of_a_rank(settings: dict[str, Any]) -> tuple[list[int], float, float]:
    """The patches that a rank computes in each micro batch of a step, the reported imbalance, and the loss."""
    parts, computed = build(tiny_run(settings)), list[int]()
    tower = parts.model.module.get_submodule("tower.blocks.0")
    tower.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].shape[1]))
    parts.stepper.forward_backward(parts.train_loader.take(16), 1)
    result = parts.stepper.update(1e-3, 0.0)
    return computed, float(result.figures["patches_imbalance"]), float(result.loss)


@pytest.mark.wide("layouts")
def test_ranks_compute_equally_many_patches_of_pictures_of_many_sizes() -> None:
    settings = {
        **SEEING,
        "model.hidden_size": 32,
        "model.num_layers": 1,
        "model.num_attention_heads": 2,
        "model.num_kv_heads": 2,
        "model.ffn_hidden_size": 32,
        "model.vocab_size": 260,
        "model.vision": {**SEEING["model.vision"], "max_pixels": 1600},
        "data.media": 4,
        "data.media_sides": [8, 40],
        "trainer.seq_length": 128,
        "trainer.global_batch_size": 16,
        "trainer.micro_batch_size": 4,
        "trainer.precision": "fp64",
        "parallel.layout": "dp2",
    }
    unequal = run_workers(2, step_of_a_rank, settings)
    balanced = run_workers(2, step_of_a_rank, {**settings, "parallel.balance": True})
    sums = [[sum(computed) for computed, _, _ in ranks] for ranks in (unequal, balanced)]
    assert sum(sums[0]) == sum(sums[1])
    for (_, reported, loss), (_, expected, other) in zip(balanced, unequal, strict=True):
        assert reported == pytest.approx(max(sums[1]) * 2 / sum(sums[1]))
        assert expected == pytest.approx(max(sums[0]) * 2 / sum(sums[0]))
        assert loss == pytest.approx(other, rel=1e-12)
    assert max(sums[1]) * 2 / sum(sums[1]) < 1.05 < max(sums[0]) * 2 / sum(sums[0])


def balanced(plan_of: Any = None, **settings: Any) -> Model:
    """The model of a run that balances; `plan_of` changes its plan before the check."""
    run = tiny_run({**SEEING, "parallel.layout": "dp2"})
    model = build_model(run)
    run.config = tiny_config({**SEEING, "parallel.layout": "dp2", "parallel.balance": True, **settings})
    model.plan = model.plan if plan_of is None else plan_of(model.plan)
    refuse_unbalanced(run, model)
    return model


def with_units(plan: Plan, name: str, **fields: Any) -> Plan:
    return replace(plan, units=tuple(replace(u, **fields) if u.name == name else u for u in plan.units))


def test_a_model_with_a_tower_is_accepted() -> None:
    assert balanced().plan.streams


def test_a_unit_of_a_stream_that_reads_tokens_is_refused() -> None:
    def reading(plan: Plan) -> Plan:
        (unit,) = (one for one in plan.units if one.name == "tower.merger")
        return with_units(plan, "tower.merger", inputs=(*unit.inputs, "positions"))

    with pytest.raises(UsageError, match=r"'tower.merger' computes patches with 'positions', which stays on the rank"):
        balanced(reading)


def test_a_join_without_the_way_back_is_refused() -> None:
    with pytest.raises(UsageError, match=f"'join' takes rows of a stream without the entry '{RETURNS}'"):
        balanced(lambda plan: with_units(plan, "join", optional=()))


def test_random_numbers_in_a_stream_are_refused() -> None:
    run = tiny_run({**SEEING, "parallel.layout": "dp2"})
    model = build_model(run)
    run.config = tiny_config({**SEEING, "parallel.layout": "dp2", "parallel.balance": True})
    model.module.get_submodule("tower.blocks.1.attn").dropout = 0.1
    with pytest.raises(UsageError, match=r"'tower.blocks.1' draws random numbers by the samples of its own rank"):
        refuse_unbalanced(run, model)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, r"parallel.balance .*models/gpt: it has no stream beside the tokens, and samples are not packed"),
        ({"parallel.balance": "sometimes"}, r"parallel.balance .*: must be true or false, not 'sometimes'"),
    ],
)
def test_balancing_nothing_and_other_words_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_model(tiny_run({"model.name": "gpt", "parallel.layout": "dp2", "parallel.balance": True, **settings}))
