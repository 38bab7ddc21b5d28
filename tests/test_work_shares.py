"""Balanced samples: equal work for ranks and micro batches, and the run of one process without balance."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mplug import UsageError
from mplug.model.build import build_model
from mplug.training.assembly import build, feed
from mplug.training.map_loader import MapLoader
from mplug_streams.work_shares import dealt, imbalance
from mplug_testing.harness import difference, tiny_run, train_ranks, train_steps, weights_off

WORK = st.lists(st.integers(0, 1000), min_size=1, max_size=12)
Cli = Callable[..., Any]


@given(WORK, st.integers(1, 5), st.integers(1, 4))
def test_every_shard_has_equally_many_samples_and_each_sample_is_dealt_once(
    work: list[int], shards: int, size: int
) -> None:
    work = work * shards
    found = dealt(work, shards, size)
    assert sorted(one for share in found for one in share) == list(range(len(work)))
    assert {len(share) for share in found} == {len(work) // shards}


@given(WORK, st.integers(1, 5), st.integers(1, 4))
def test_no_shard_has_more_than_another_by_more_than_the_heaviest_micro_batch(
    work: list[int], shards: int, size: int
) -> None:
    work = work * shards
    sums = [sum(work[one] for one in share) for share in dealt(work, shards, size)]
    assert max(sums) - min(sums) <= size * max(work)


def long_tailed(number: int, seed: int) -> list[int]:
    """Samples with one document of a long-tailed length, whose work is its square, and equal others."""
    draw = random.Random(seed)
    return [100_000 + min(1000, int(draw.lognormvariate(5, 1.2))) ** 2 for _ in range(number)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_that_wait_in_every_micro_batch_wait_little(size: int) -> None:
    shards, number = 8, 16
    work = long_tailed(shards * number * size, size)
    found = dealt(work, shards, size)

    def waiting(shares: list[list[int]]) -> float:
        """The work of the slowest rank in each micro batch, summed, over the mean of ranks."""
        batches = [
            [sum(work[one] for one in share[start : start + size]) for share in shares]
            for start in range(0, number * size, size)
        ]
        return sum(map(max, batches)) * shards / sum(map(sum, batches))

    before = [list(range(part * number * size, (part + 1) * number * size)) for part in range(shards)]
    assert imbalance(work, found) < 1.02 < imbalance(work, before)
    assert waiting(found) < 1.15
    assert waiting(before) > 1.2


def test_smaller_micro_batches_are_the_last_of_every_shard() -> None:
    work = [9, 1, 8, 2, 7, 3, 6, 4, 5, 5]
    found = dealt(work, 2, 2)
    sums = [[sum(work[one] for one in share[start : start + 2]) for start in (0, 2, 4)] for share in found]
    assert [len(share) for share in found] == [5, 5]
    assert abs(sum(sums[0]) - sum(sums[1])) <= 2
    assert abs(sums[0][0] - sums[1][0]) <= 2


def loaders(shards: int, balances: bool, size: int = 2) -> list[MapLoader]:
    def documents(number: int) -> list[int]:
        return [1 + number * 7 % 13, 16 - (1 + number * 7 % 13)]

    def read(samples: Any) -> dict[str, torch.Tensor]:
        return {"sample_ids": torch.tensor(list(samples))}

    found = [
        MapLoader(read, vocab_size=7, shard=(part, shards), micro_batch_size=size, documents=documents)
        for part in range(shards)
    ]
    for loader in found:
        loader.weigh(lambda lengths: sum(one * one for one in lengths), balances)
    return found


def test_the_samples_of_a_step_are_the_same_set_and_a_resumed_loader_deals_the_same() -> None:
    balanced = loaders(4, balances=True)
    steps = [[[batch["sample_ids"].tolist() for batch in one.take(24)] for one in balanced] for _ in range(3)]
    for number, step in enumerate(steps):
        ids = sorted(one for share in step for batch in share for one in batch)
        assert ids == list(range(24 * number, 24 * (number + 1)))
        assert {len(share) for share in step} == {3}
    assert len({one.imbalance for one in balanced}) == 1
    plain = loaders(4, balances=False)
    assert [[batch["sample_ids"].tolist() for batch in one.take(24)] for one in plain] == [
        [[6 * part + 2 * batch, 6 * part + 2 * batch + 1] for batch in range(3)] for part in range(4)
    ]
    first = loaders(4, balances=True)[0]
    assert first.imbalance is None
    next(iter(first.take(24)))
    assert first.imbalance is not None
    assert plain[0].imbalance is not None
    assert 1 <= first.imbalance < plain[0].imbalance
    resumed = loaders(4, balances=True)[1]
    resumed.load_state_dict({"samples": 48})
    assert [batch["sample_ids"].tolist() for batch in resumed.take(24)] == steps[2][1]


PACKED: dict[str, Any] = {"data.name": "mock", "data.documents": 5, "trainer.seq_length": 16, "model.num_layers": 2}
PACKED |= {"trainer.global_batch_size": 16, "trainer.micro_batch_size": 2, "trainer.precision": "fp64"}
LAYOUTS = {"dp2": 2, "fsdp2": 2, "zero2": 2, "dp2tp2": 4, "dp2pp2": 4, "cp2dp2": 4, "dp4": 4}


@pytest.mark.wide("layouts", quick=["dp2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_balanced_run_is_the_run_of_one_process_without_balance(layout: str) -> None:
    found = train_ranks(LAYOUTS[layout], {**PACKED, "parallel.layout": layout, "parallel.balance": True})
    reference = train_steps(PACKED)
    assert difference(found, reference) == ""
    assert weights_off(found, reference) == ""


def test_a_balanced_run_reads_other_samples_on_a_rank_than_one_without() -> None:
    ids = []
    for balance in (False, True):
        run = tiny_run({**PACKED, "parallel.layout": "dp2", "parallel.balance": balance})
        loader = build(run).train_loader.loader
        ids.append([one for batch in loader.take(16) for one in batch["sample_ids"].tolist()])
    assert ids[0] == list(range(8))
    assert len(set(ids[1])) == 8
    assert ids[1] != ids[0]


def test_an_evaluation_reads_the_global_order() -> None:
    """It leaves labels of the last samples out if ranks do not divide their number."""
    run = tiny_run({**PACKED, "parallel.layout": "dp2", "parallel.balance": True})
    run.trains = False
    source = feed(run, build_model(run), "train")
    samples = [int(one) for batch in source.take_evenly(5) for one in batch["sample_ids"]]
    assert samples == [0, 1, 2]


@pytest.mark.wide("layouts")
def test_metrics_say_how_unequal_the_work_of_ranks_is(tmp_path: Path, cli_here: Cli) -> None:
    draw, line = (
        random.Random(3),
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": %s}]}',
    )
    lengths = [min(200, int(draw.lognormvariate(3.2, 1.0))) + 1 for _ in range(300)]
    (tmp_path / "chats.jsonl").write_text("\n".join(line % json.dumps("b" * length) for length in lengths))
    words = ("model.vocab_size=259", "model.num_layers=1", "trainer.steps=3", "trainer.seq_length=256")
    words += (
        "trainer.global_batch_size=8",
        "trainer.micro_batch_size=1",
        "trainer.eval_every=0",
        "data.path=chats.jsonl",
    )
    found = {}
    for name, balance in (("plain", "false"), ("balanced", "true")):
        more = (*words, f"parallel.balance={balance}")
        settings = (word for one in more for word in ("--set", one))
        result = cli_here("train", "--data", "packed", "--parallel", "dp2", "--name", name, *settings)
        assert result.returncode == 0, result.stderr
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(one) for one in lines]
        found[name] = [(one["loss"], one["work_imbalance"]) for one in records if "work_imbalance" in one]
    assert len(found["plain"]) == len(found["balanced"]) == 3
    for (loss, before), (balanced, after) in zip(found["plain"], found["balanced"], strict=True):
        assert balanced == pytest.approx(loss, rel=1e-4)
        assert 1 <= after <= before


def test_data_without_documents_cannot_be_balanced() -> None:
    words = "samples are not packed"
    with pytest.raises(UsageError, match=words):
        build(tiny_run({**PACKED, "data.documents": 1, "parallel.layout": "dp2", "parallel.balance": True}))
