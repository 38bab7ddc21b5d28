"""The feed and its loader: micro batches are read in order when they are asked for, and the time for it is counted."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mplug.training.feed
from mplug import Loader, MapLoader, MicroBatch, RunError
from mplug.training.assembly import Parts, build
from mplug.training.feed import Feed
from mplug_testing.harness import tiny_run
from mplug_testing.workers import run_workers

SIZE = 2
STEP = 8


def loader(shard: tuple[int, int] = (0, 1), micro_batch_size: int = SIZE) -> MapLoader:
    def read(sample_ids: range) -> MicroBatch:
        return {"sample_ids": torch.tensor(list(sample_ids))}

    return MapLoader(read, vocab_size=7, shard=shard, micro_batch_size=micro_batch_size)


class Lazy(Loader):
    """A loader that moves on only while it is read; what it does before each micro batch is a function's."""

    vocab_size = 7

    def __init__(self, before: Any = None) -> None:
        self.before, self.samples = before, 0

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        for _ in range(num_samples):
            if self.before is not None:
                self.before(self.samples)
            yield {"sample_ids": torch.tensor([self.samples])}
            self.samples += 1

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


def ids(micro_batches: Any) -> list[int]:
    return [number for batch in micro_batches for number in batch["sample_ids"].tolist()]


# The loader of samples that can be read directly: one order whatever the ranks, and a state of one number.


def test_samples_come_in_order_and_in_micro_batches_and_taking_moves_the_state_before_the_first_is_read() -> None:
    found = loader()
    unread = found.take(4)
    assert found.state_dict() == {"samples": 4}
    assert [ids([batch]) for batch in found.take(3)] == [[4, 5], [6]]
    assert [ids([batch]) for batch in unread] == [[0, 1], [2, 3]]
    assert found.vocab_size == 7


SIZES = st.lists(st.integers(1, 24), min_size=1, max_size=4)


@settings(max_examples=80)
@given(SIZES, SIZES, st.integers(1, 6), st.integers(1, 6), st.integers(1, 5))
def test_ranks_take_together_what_one_takes_and_others_continue_from_their_state(
    before: list[int], after: list[int], count: int, others: int, micro_batch_size: int
) -> None:
    alone = loader()
    ranks = [loader((index, count), micro_batch_size) for index in range(count)]
    for batch in before:
        parts = [ids(rank.take(batch)) for rank in ranks]
        assert [number for part in parts for number in part] == ids(alone.take(batch))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    state = ranks[-1].state_dict()
    assert state == {"samples": sum(before)}, "plain data, which counts the samples of all ranks"
    ranks = [loader((index, others)) for index in range(others)]
    for rank in ranks:
        ids(rank.take(3))
        rank.load_state_dict(state)
    for batch in after:
        assert sorted(n for rank in ranks for n in ids(rank.take(batch))) == ids(alone.take(batch))


# What is taken.


def test_on_a_cpu_a_micro_batch_is_the_loaders_own() -> None:
    batch = {"sample_ids": torch.zeros(SIZE)}
    own = loader()
    own.read = lambda _: batch
    (taken,) = Feed(own, "cpu").take(SIZE)
    assert taken.entries is batch


def test_nothing_is_read_before_it_is_asked_for_and_nothing_beyond_what_was_taken() -> None:
    read: list[int] = []
    taken = Feed(Lazy(read.append), "cpu").take(3)
    for number in range(3):
        assert read == list(range(number))
        assert next(taken).is_last == (number == 2)
    with pytest.raises(StopIteration):
        next(taken)
    assert read == [0, 1, 2]


@pytest.mark.parametrize("kind", [loader, Lazy])
def test_the_state_is_the_loaders_and_continues_exactly(kind: Any) -> None:
    feed, again = Feed(kind(), "cpu"), Feed(kind(), "cpu")
    ids(feed.take(6))
    state = feed.state_dict()
    assert state == {"samples": 6}
    again.load_state_dict(state)
    assert ids(again.take(4)) == ids(feed.take(4)) == [6, 7, 8, 9]
    assert feed.vocab_size == 7


def test_the_micro_batch_that_ends_the_step_is_marked_whatever_the_sizes() -> None:
    batches = [{"sample_ids": torch.arange(size)} for size in (1, 3, 2)]
    marked = [(batch.number, batch.is_last) for batch in Feed(loader(), "cpu").step_of(batches)]
    assert marked == [(0, False), (1, False), (2, True)]


@pytest.mark.parametrize(("size", "words"), [(1, "ended 3 samples before"), (4, "has 2 samples more")])
def test_a_loader_with_other_samples_than_promised_is_an_error(size: int, words: str) -> None:
    own: Any = Lazy()
    own.take = lambda _: iter([{"sample_ids": torch.arange(size)}] * (2 if size == 4 else 3))
    with pytest.raises(RunError, match=words):
        list(Feed(own, "cpu").take(6))


def test_positions_and_targets_are_those_of_the_whole_micro_batch() -> None:
    labels = torch.tensor([[1, -100, 3, -100]])
    whole = {"sample_ids": torch.zeros(1), "labels": labels}
    (batch,) = Feed(loader(), "cpu", cut=lambda batch: {**batch, "labels": labels[:, :1]}).step_of([whole])
    assert (batch.positions, batch.targets, batch["labels"].numel()) == (4, 2, 1)


def test_a_stepper_that_leaves_out_the_last_micro_batch_is_an_error(parts: Parts) -> None:
    with pytest.raises(RuntimeError, match="has not run the last micro batch"):
        parts.stepper.forward_backward(list(parts.train_loader.take(STEP))[:-1], 1)


# What is copied.


def copied_bytes(settings: dict[str, Any]) -> dict[str, int]:
    """Be one rank: the bytes of every entry that a step's copies to the device receive."""
    run = tiny_run({"trainer.micro_batch_size": SIZE, "trainer.global_batch_size": STEP, **settings})
    parts, found = build(run), Counter[str]()

    def count(batch: MicroBatch) -> MicroBatch:
        found.update({name: entry.nbytes for name, entry in batch.items()})
        return batch

    parts.train_loader._move = count
    parts.stepper.forward_backward(parts.train_loader.take(STEP), 1)
    return dict(found)


SHIFTED = {"model.name": "llama", "model.num_layers": 1, "model.hidden_size": 32, "model.ffn_hidden_size": 32}
SHIFTED |= {"model.num_attention_heads": 2, "model.num_kv_heads": 2, "model.vocab_size": 259, "model.num_mtp_layers": 1}


@pytest.mark.parametrize("settings", [{}, SHIFTED], ids=["gpt", "a model with shifted entries"])
@pytest.mark.wide("layouts", quick=["gpt"])
def test_a_context_parallel_rank_copies_only_its_part_to_the_device(settings: dict[str, Any]) -> None:
    whole = copied_bytes(settings)
    for rank in run_workers(2, copied_bytes, {**settings, "parallel.layout": "cp2"}):
        assert rank.keys() == whole.keys()
        for name, num_bytes in whole.items():
            assert rank[name] == (num_bytes if name == "sample_ids" else num_bytes // 2), name


# What it costs.


def test_the_time_that_the_loader_takes_is_counted_also_before_it_fails_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    def clock(seconds: float) -> None:
        now[0] += seconds

    def read(number: int) -> None:
        clock([0.5, 0.25, 2.0][number])
        if number == 2:
            raise OSError("the disk is gone")

    monkeypatch.setattr(mplug.training.feed.time, "perf_counter", lambda: now[0])
    taken, waited = Feed(Lazy(read), "cpu").take(3), []
    clock(64.0)
    for _ in range(2):
        waited.append((next(taken)["sample_ids"].item(), taken.wait_seconds))
        clock(32.0)
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)
    assert [*waited, taken.wait_seconds] == [(0, 0.5), (1, 0.75), 2.75]


# Who asks for it, and when.


@pytest.fixture
def parts() -> Parts:
    return build(tiny_run({"trainer.micro_batch_size": SIZE, "trainer.global_batch_size": STEP}))


@pytest.fixture
def told(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read and what is computed, in order."""
    log: list[str] = []
    outputs = parts.model.outputs

    def computed(batch: MicroBatch) -> Any:
        log.append(f"compute {batch['sample_ids'][0] // SIZE}")
        return outputs(batch)

    monkeypatch.setattr(parts.model, "outputs", computed)
    for feed in (parts.train_loader, parts.validation_loader):
        assert feed is not None
        own: Any = feed.loader

        def read(sample_ids: range, original: Any = own.read) -> MicroBatch:
            log.append(f"read {sample_ids.start // SIZE}")
            return original(sample_ids)

        own.read = read
    return log


def test_steps_and_evaluations_read_each_micro_batch_once_the_one_before_it_was_launched(
    parts: Parts, told: list[str]
) -> None:
    assert parts.validation_loader is not None
    for feed, compute in (
        (parts.train_loader, lambda batches: parts.stepper.forward_backward(batches, 1)),
        (parts.validation_loader, parts.stepper.evaluate),
    ):
        told.clear()
        compute(feed.take(STEP))
        assert told == [f"{what} {number}" for number in range(STEP // SIZE) for what in ("read", "compute")]
        assert feed.state_dict() == {"samples": STEP}
