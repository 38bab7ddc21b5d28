"""Reading once (`parallel.read_once`): one rank of those with the same samples reads, and no bit of a run changes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from tiny_tower import SEEING

from mplug import Loader, MapLoader, MicroBatch, UsageError
from mplug.errors import PluginError, RunError
from mplug.training.assembly import build
from mplug_streams.sharing import SharedLoader, packed, unpacked
from mplug_testing import run_workers
from mplug_testing.harness import Trace, tiny_run, train_steps
from mplug_validation import evaluate

SMALL: dict[str, Any] = {"model.num_layers": 4, "trainer.global_batch_size": 8, "trainer.micro_batch_size": 1}
PICTURES: dict[str, Any] = {
    **SEEING,
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_attention_heads": 2,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 32,
    "model.vocab_size": 260,
}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-limited", "zb-v", "dualpipe-v")


def both(ranks: int, settings: Mapping[str, Any]) -> tuple[list[Trace], list[Trace]]:
    """The traces of all ranks, where each rank reads, and where one reads for all with the same samples."""
    each, once = (run_workers(ranks, train_steps, {**settings, "parallel.read_once": one}) for one in (False, True))
    return each, once


def assert_same_bits(ranks: int, settings: Mapping[str, Any]) -> None:
    for each, once in zip(*both(ranks, settings), strict=True):
        assert once.losses == each.losses
        assert once.norms == each.norms
        assert once.val_loss == each.val_loss
        for name, boxes in each.weights.items():
            for (start, values), (other, found) in zip(boxes, once.weights[name], strict=True):
                assert start == other
                assert torch.equal(values, found), name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.wide("layouts", quick=["zb-v"])
def test_no_bit_changes_under_any_schedule(schedule: str) -> None:
    chunks = {"parallel.pp.chunks": 2} if schedule == "interleaved" else {}
    assert_same_bits(2, {**SMALL, "parallel.layout": "pp2", "parallel.pp.schedule": schedule, **chunks})


@pytest.mark.parametrize("layout", ["tp2cp2", "tp2dp2", "cp2pp2"])
@pytest.mark.wide("layouts")
def test_no_bit_changes_along_any_axis(layout: str) -> None:
    assert_same_bits(4, {**SMALL, "parallel.layout": layout})


@pytest.mark.parametrize("layout", ["pp2", "tp2"])
@pytest.mark.wide("layouts")
def test_no_bit_changes_with_pictures(layout: str) -> None:
    assert_same_bits(2, {**PICTURES, "parallel.layout": layout})


# Which rank reads what.


def counted_reads(settings: Mapping[str, Any], steps: int) -> list[int]:
    """Be one rank: train and evaluate; the numbers of the training samples that this rank has read."""
    read: list[int] = []
    make = MapLoader.__init__

    def counting(self: MapLoader, of: Any, **arguments: Any) -> None:
        def noted(samples: Sequence[int]) -> MicroBatch:
            read.extend(samples)
            return of(samples)

        make(self, noted, **arguments)

    MapLoader.__init__ = counting  # type: ignore[method-assign]
    run = tiny_run(settings)
    parts = build(run)
    for step in range(1, steps + 1):
        run.step = step
        parts.stepper.forward_backward(parts.train_loader.take(8), step)
        parts.stepper.update(1e-3, 0.1)
    return read


@pytest.mark.parametrize(
    ("layout", "ranks", "readers"), [("tp4pp2", 8, 1), ("tp2dp2", 4, 2), ("pp2", 2, 1)], ids=["tp4pp2", "tp2dp2", "pp2"]
)
@pytest.mark.wide("layouts", quick=["pp2"])
def test_each_sample_is_read_once(layout: str, ranks: int, readers: int) -> None:
    settings = {**SMALL, "parallel.layout": layout, "model.num_attention_heads": 4, "trainer.eval_every": 0}
    each = run_workers(ranks, counted_reads, settings, 3)
    once = run_workers(ranks, counted_reads, {**settings, "parallel.read_once": True}, 3)
    assert set(Counter(sample for read in each for sample in read).values()) == {ranks // readers}
    assert Counter(sample for read in once for sample in read) == Counter(range(24))
    assert sum(map(bool, once)) == readers


# State, failures and an evaluation that stops early.


class Failing(Loader):
    """Fails at its third micro batch, as `how` says."""

    vocab_size = 320

    def __init__(self, inner: Loader, how: str) -> None:
        self.inner, self.how = inner, how

    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        for number, batch in enumerate(self.inner.take(num_samples)):
            if number == 2:
                if self.how == "file":
                    raise OSError(5, "Input/output error", "corpus.bin")
                if self.how == "data":
                    raise UsageError("corpus.bin: sample 2 has no tokens; prepare the data again")
                if self.how == "bug":
                    raise KeyError("tokens")
                if self.how == "unsendable":
                    raise Unsendable(1, 2)
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("samples") == -1:
            raise UsageError("the state is of other data")
        self.inner.load_state_dict(state)


class Unsendable(Exception):
    """An exception that a pickle does not restore."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def failure(how: str) -> tuple[str, str]:
    """Be one rank of a pipeline whose data fail: the class and the message of the error."""
    run = tiny_run({**SMALL, "parallel.layout": "pp2", "parallel.read_once": True, "trainer.eval_every": 0})
    parts = build(run)
    shared: Any = parts.train_loader.loader
    if shared._loader is not None:
        shared._loader = Failing(shared._loader, how)
    try:
        if how == "state":
            parts.train_loader.load_state_dict({"samples": -1})
        run.step = 1
        list(parts.train_loader.take(8))
    except (UsageError, RunError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("file", RunError, "corpus.bin"),
        ("data", UsageError, "sample 2 has no tokens"),
        ("bug", PluginError, "KeyError: 'tokens'"),
        ("unsendable", PluginError, "1 and 2"),
        ("short", RunError, "ended early"),
        ("state", UsageError, "the state is of other data"),
    ],
)
def test_a_failure_on_the_reading_rank_reaches_all(how: str, kind: type, words: str) -> None:
    for name, message in run_workers(2, failure, how):
        assert issubclass({"RunError": RunError, "UsageError": UsageError, "PluginError": PluginError}[name], kind)
        assert words in message


def positions(settings: Mapping[str, Any]) -> list[Any]:
    """Be one rank: the state after a step, an abandoned evaluation and its state, and the samples after a resume."""
    run = tiny_run({**SMALL, **settings, "trainer.eval_samples": 8})
    parts = build(run)
    found: list[Any] = []
    for step in (1, 2):
        run.step = step
        parts.stepper.forward_backward(parts.train_loader.take(8), step)
        parts.stepper.update(1e-3, 0.1)
    found.append(parts.train_loader.state_dict())
    beginning = parts.validation_loader.state_dict()
    batches = parts.validation_loader.take_evenly(8)
    next(batches)
    del batches  # an evaluation that a signal stops
    parts.validation_loader.load_state_dict(beginning)
    found.append(evaluate(run, parts))
    parts.train_loader.load_state_dict({"samples": 8}, 8)
    found.append([batch["sample_ids"].tolist() for batch in parts.train_loader.take(8)])
    found.append(parts.train_loader.loader.fingerprint)
    return found


@pytest.mark.parametrize(("layout", "ranks"), [("pp2", 2), ("tp2dp2", 4)], ids=["pp2", "tp2dp2"])
@pytest.mark.wide("layouts", quick=["pp2"])
def test_state_and_position_are_those_of_a_loader_on_each_rank(layout: str, ranks: int) -> None:
    settings = {"parallel.layout": layout}
    each, once = (run_workers(ranks, positions, {**settings, "parallel.read_once": one}) for one in (False, True))
    assert once == each


def test_a_message_has_the_bits_of_its_tensors() -> None:
    batch = {
        "tokens": torch.arange(21).view(3, 7),
        "positions": torch.arange(7).expand(3, 7),
        "pixels": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        "none": torch.zeros(0, 4),
        "flag": torch.tensor(True),
    }
    found = unpacked(packed(batch))
    assert list(found) == list(batch)
    for name, values in batch.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values)


def test_one_rank_alone_reads_itself() -> None:
    loader = build(tiny_run({**SMALL, "parallel.read_once": True})).train_loader.loader
    assert not isinstance(loader, SharedLoader)
