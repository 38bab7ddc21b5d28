"""The feed: micro batches are read when they are asked for, in order, and the time that this takes is counted."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mplug_testing.harness import tiny_run

import mplug.training.feed
from mplug import MapLoader, MicroBatch
from mplug.training.assembly import Parts, build
from mplug.training.feed import Feed

SIZE = 2
STEP = 8


def loader() -> MapLoader:
    def read(sample_ids: range) -> MicroBatch:
        return {"sample_ids": torch.tensor(list(sample_ids))}

    return MapLoader(read, vocab_size=7, shard=(0, 1), micro_batch_size=SIZE)


class Lazy:
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


# What is taken.


def test_micro_batches_come_as_the_loader_gives_them_and_in_its_order() -> None:
    feed, own = Feed(loader(), "cpu"), loader()
    for portion in (4, 3, 8):
        assert [b["sample_ids"].tolist() for b in feed.take(portion)] == [
            b["sample_ids"].tolist() for b in own.take(portion)
        ]
    assert feed.vocab_size == 7


def test_on_a_cpu_a_micro_batch_is_the_loaders_own() -> None:
    batch = {"tokens": torch.zeros(1)}
    own = loader()
    own.read = lambda _: batch
    (taken,) = Feed(own, "cpu").take(SIZE)
    assert taken is batch


def test_nothing_is_read_before_it_is_asked_for_and_nothing_beyond_what_was_taken() -> None:
    read: list[int] = []
    taken = Feed(Lazy(read.append), "cpu").take(3)
    for number in range(3):
        assert read == list(range(number))
        next(taken)
    with pytest.raises(StopIteration):
        next(taken)
    assert read == [0, 1, 2]


@pytest.mark.parametrize("kind", [loader, Lazy])
def test_the_state_is_the_loaders_and_continues_exactly(kind: Any) -> None:
    feed = Feed(kind(), "cpu")
    ids(feed.take(6))
    state = feed.state_dict()
    assert state == {"samples": 6}
    following = ids(feed.take(4))
    again = Feed(kind(), "cpu")
    again.load_state_dict(state)
    assert ids(again.take(4)) == following == [6, 7, 8, 9]


def test_what_a_loader_raises_comes_where_its_micro_batch_is_asked_for() -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise OSError("the disk is gone")

    taken = Feed(Lazy(fail), "cpu").take(4)
    assert [next(taken)["sample_ids"].item() for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)


# What it costs.


def test_the_time_that_the_loader_takes_is_counted_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(mplug.training.feed.time, "perf_counter", lambda: now[0])
    taken = Feed(Lazy(lambda number: clock([0.5, 0.25, 2.0][number])), "cpu").take(3)
    clock(64.0)
    waited = []
    for _ in taken:
        waited.append(taken.wait_seconds)
        clock(32.0)
    assert [*waited, taken.wait_seconds] == [0.5, 0.75, 2.75, 2.75]


def test_the_time_before_a_loader_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 4.0])
    monkeypatch.setattr(mplug.training.feed.time, "perf_counter", lambda: next(times))

    def fail(number: int) -> None:
        raise OSError("the disk is gone")

    taken = Feed(Lazy(fail), "cpu").take(1)
    with pytest.raises(OSError, match="gone"):
        next(taken)
    assert taken.wait_seconds == 3.0


# Who asks for it, and when.


@pytest.fixture
def parts() -> Parts:
    return build(tiny_run({"trainer.micro_batch_size": SIZE, "trainer.global_batch_size": STEP}))


@pytest.fixture
def told(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read and what is computed, in order."""
    log: list[str] = []
    loss = parts.model.loss

    def computed(batch: MicroBatch) -> Any:
        log.append(f"compute {batch['sample_ids'][0] // SIZE}")
        return loss(batch)

    monkeypatch.setattr(parts.model, "loss", computed)
    for feed in (parts.train_loader, parts.validation_loader):
        assert feed is not None
        own: Any = feed.loader

        def read(sample_ids: range, original: Any = own.read) -> MicroBatch:
            log.append(f"read {sample_ids.start // SIZE}")
            return original(sample_ids)

        own.read = read
    return log


def test_a_step_reads_the_micro_batch_after_the_one_that_it_computes_and_no_further(
    parts: Parts, told: list[str]
) -> None:
    parts.stepper.forward_backward(parts.train_loader.take(STEP), 1)
    expected = ["read 0", "read 1", "compute 0", "read 2", "compute 1", "read 3", "compute 2", "compute 3"]
    assert told == expected
    assert parts.train_loader.state_dict() == {"samples": STEP}


def test_an_evaluation_reads_each_micro_batch_once_the_one_before_it_was_launched(
    parts: Parts, told: list[str]
) -> None:
    assert parts.validation_loader is not None
    parts.stepper.evaluate(parts.validation_loader.take(3 * SIZE))
    assert told == ["read 0", "compute 0", "read 1", "compute 1", "read 2", "compute 2"]
