"""Failures of loaders and other plugins: one sentence with plugin, sample and cause; the log has the traceback."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mplug import MapLoader, MicroBatch
from mplug.contracts.loader import Loader
from mplug.errors import PluginError, RunError, UsageError
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug.training.feed import Feed
from mplug.training.loop import train
from mplug.training.source import Source
from mplug_faults import Supervised, plugin_error
from mplug_launch.pipes import Pipes
from mplug_testing.harness import tiny_run

S, V, SIZE = 6, 11, 2
SOURCE = Source("data/acme", "train", S, shards=1, rank=3)


def batch(sample_ids: range) -> MicroBatch:
    tokens = torch.arange(S + 1).expand(len(sample_ids), S + 1) % V
    return {
        "tokens": tokens[:, :-1].clone(),
        "labels": tokens[:, 1:].clone(),
        "positions": torch.arange(S)[None],
        "sample_ids": torch.tensor(list(sample_ids)),
    }


def loader(read: Callable[[range], Any] = batch) -> MapLoader:
    return MapLoader(read, vocab_size=V, shard=(0, 1), micro_batch_size=SIZE, samples_per_epoch=10)


def feed(own: Loader) -> Feed:
    return Feed(own, "cpu", SOURCE)


def spoilt(sample_ids: range, spoil: Callable[[MicroBatch], Any]) -> Any:
    own = batch(sample_ids)
    return (spoil(own) or own) if 10 in sample_ids else own


def first(error: BaseException, own: Loader | None = None) -> str:
    """What the feed says of a loader that raises `error` at sample 10, in the second epoch."""

    def read(sample_ids: range) -> MicroBatch:
        if 10 in sample_ids:
            raise error
        return batch(sample_ids)

    fed = feed(loader(read))
    list(fed.take(8))
    with pytest.raises((UsageError, RunError)) as caught:
        list(fed.take(8))
    assert caught.value is error or caught.value.__cause__ is not None, "the traceback of the loader is lost"
    return f"{type(caught.value).__name__}: {caught.value}"


WHERE = "in samples 8 to 15 of the training data (epoch 1), after sample 9"


DISK = OSError(5, "Input/output error", "/data/x.bin")
ENDED = f"ended early {WHERE}: it yielded 2 of the 8 samples that rank 3 reads"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (KeyError("text"), f"PluginError: data/acme failed {WHERE}: KeyError: 'text'; its traceback is in logs/rank3."),
        (RuntimeError("two\nlines"), f"PluginError: data/acme failed {WHERE}: RuntimeError: two lines; its"),
        (DISK, f"RunError: data/acme failed {WHERE}: OSError: [Errno 5] Input/output error: '/data/x.bin'"),
        (StopIteration(), f"PluginError: data/acme {ENDED}"),
        (UsageError("'x.txt' is empty"), "UsageError: 'x.txt' is empty"),
    ],
)
def test_what_a_loader_raises_names_plugin_samples_and_cause(error: Exception, sentence: str) -> None:
    assert sentence in first(error)


@pytest.mark.parametrize("given", [0, 5, 9])
def test_a_loader_that_gives_too_few_samples_or_too_many_is_refused(given: int) -> None:
    class Short(MapLoader):
        def take(self, num_samples: int) -> Iterator[MicroBatch]:
            return iter(batch(range(n, n + 1)) for n in range(given))

    fed = feed(Short(batch, vocab_size=V, shard=(0, 1), micro_batch_size=SIZE))
    words = (
        f"ended early .* it yielded {given} of the 8 samples"
        if given < 8
        else "yields 9 samples, and rank 3 reads at most 8 of them"
    )
    with pytest.raises(PluginError, match=words):
        list(fed.take(8))


def filled(name: str, row: int, value: int) -> Callable[[MicroBatch], None]:
    """Fill a row of an entry with a value."""
    return lambda own: own[name][row].fill_(value) is None


FAULTS: dict[str, tuple[Callable[[MicroBatch], Any], type[Exception], str]] = {
    "no batch": (lambda _: 3, PluginError, "the micro batch is a int; it must be a dict"),
    "no positions": (lambda own: own.pop("positions") is None, PluginError, "has no entry 'positions'"),
    "a list": (lambda own: {**own, "tokens": [[1]]}, PluginError, "'tokens' is a list; every entry must be a"),
    "shorter": (lambda own: {**own, "labels": own["labels"][:, 1:]}, PluginError, r"'labels' has shape \(2, 5\)"),
    "floats": (lambda own: {**own, "tokens": own["tokens"].float()}, PluginError, "'tokens' has dtype torch.float32"),
    "a label": (filled("labels", 1, V), UsageError, f"'labels' holds {V} in sample 11; .* 0 to {V - 1}"),
    "a token": (filled("tokens", 0, -1), UsageError, "'tokens' holds -1 in sample 10"),
    "a position": (filled("positions", 0, S), UsageError, f"'positions' holds {S}; values must be 0 to {S - 1}"),
    "a NaN": (
        lambda own: {**own, "images": torch.tensor([[0.0], [float("nan")]])},
        UsageError,
        "'images' holds a value that is not finite in sample 11",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_micro_batch_that_no_model_can_take_is_refused_on_the_cpu(fault: str) -> None:
    spoil, kind, words = FAULTS[fault]
    fed = feed(loader(lambda ids: spoilt(ids, spoil)))
    assert len(list(fed.take(10))) == 5
    with pytest.raises(kind, match=f"^data/acme .*in samples 10 to 13 .*{words}"):
        list(fed.take(4))


def test_ignored_labels_and_every_token_of_the_vocabulary_pass() -> None:
    def read(sample_ids: range) -> MicroBatch:
        own = batch(sample_ids)
        own["labels"][0] = -100
        own["tokens"][0, 0] = V - 1
        return {**own, "images": torch.zeros(len(sample_ids), 2)}

    assert len(list(feed(loader(read)).take(4))) == 2


def test_a_state_that_cannot_be_made_or_loaded_names_the_plugin() -> None:
    fed = feed(loader())
    words = r"data/acme failed in load_state_dict of the training data, .*KeyError: 'samp"
    with pytest.raises(PluginError, match=words):
        fed.load_state_dict({})
    list(fed.take(4))
    fed.loader.state_dict = lambda: {}["n"]  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=r"failed in state_dict of the training data, after 4 samples: KeyError: 'n'"):
        fed.state_dict()


class Rows(Dataset[MicroBatch]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> MicroBatch:
        raise self.error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (KeyError("text"), r"^data/acme failed .*: KeyError: 'text' \(in DataLoader worker process 0\); its traceback"),
        (RunError("'a.tar' is cut off"), r"^'a.tar' is cut off$"),
    ],
)
def test_what_a_worker_process_raises_is_one_sentence(error: Exception, sentence: str) -> None:
    batches: Any = iter(DataLoader(Rows(error), batch_size=None, num_workers=1))

    class Prefetching(MapLoader):
        def take(self, num_samples: int) -> Iterator[MicroBatch]:
            return batches  # type: ignore[no-any-return]

    fed = feed(Prefetching(batch, vocab_size=V, shard=(0, 1), micro_batch_size=SIZE))
    with pytest.raises(RunError, match=sentence) as caught:
        list(fed.take(4))
    assert "Traceback" in str(caught.value.__cause__)
    batches._shutdown_workers()  # a garbage collection in a later test would wait 5 s for the worker


def test_the_numbers_of_samples_on_a_device_are_not_read_while_all_is_well() -> None:
    """A tensor of the device 'meta' cannot be read at all."""
    fed = loader(lambda sample_ids: {name: entry.to("meta") for name, entry in batch(sample_ids).items()})
    assert len(list(Supervised(fed, SOURCE).take(4))) == 2


# Other plugins.


def module_of(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    return module


PLUGINS = """
class Stepper:
    def run(self, error):
        raise error
class Left:
    def step(self, error, *_):
        raise error
    def shard_model(self, error):
        Stepper().run(error)
    shard_model.mplug_impl = {}
    def helper(self, error):
        Stepper().run(error)
class Right(Left):
    def shard_model(self, error):
        Stepper().run(error)
    shard_model.mplug_impl = {}
"""


def blamed(run: Run, error: BaseException, call: Callable[[BaseException], None]) -> str:
    """Which part of a run is said to have failed where a call raises an error."""
    with pytest.raises(type(error)) as caught:
        call(error)
    return str(plugin_error(run.hooks, caught.value, "in step 7", "logs/rank0.log"))


def test_an_exception_of_a_plugin_is_attributed_to_it_by_its_traceback() -> None:
    run, plugin = tiny_run({}), module_of("mplug_acme", PLUGINS).Left()
    run.hooks.plugins["optimizers/acme"] = plugin
    assert blamed(run, TypeError("no"), plugin.step) == (
        "optimizers/acme failed in step 7, in Left.step (mplug_acme.py:7): TypeError: no; "
        "its traceback is in logs/rank0.log"
    )
    assert "in the hook 'shard_model', in Stepper.run" in blamed(run, TypeError("no"), plugin.shard_model)
    world = (torch.OutOfMemoryError("out"), torch.AcceleratorError("assert"), torch.distributed.DistNetworkError("no"))
    broken = map(RuntimeError, ("gloo/pair.cc: no", "NCCL error", "Connection reset by peer", "Broken pipe"))
    for error in (UsageError("u"), OSError(28, "full"), KeyboardInterrupt(), *world, *broken):
        assert blamed(run, error, plugin.step) == "None"
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("NCCL is no backend of mine")):
        assert blamed(run, error, plugin.step).startswith("optimizers/acme failed")


def test_of_two_plugins_of_a_package_the_one_that_ran_is_blamed_and_both_where_no_frame_says_which() -> None:
    module = module_of("mplug_pair", PLUGINS)
    run, left, right = tiny_run({}), module.Left(), module.Right()
    run.hooks.plugins.update({"parallel/left": left, "parallel/right": right})
    calls = {
        left.shard_model: "parallel/left",
        right.shard_model: "parallel/right",
        left.helper: "parallel/left",
        module.Stepper().run: "one of parallel/left and parallel/right",
    }
    for call, owner in calls.items():
        assert blamed(run, TypeError("no"), call).startswith(f"{owner} failed in step 7")
    unbound = partial(module.Left.shard_model, None)
    assert blamed(run, TypeError("no"), unbound).startswith("parallel/left failed in step 7")


def test_a_bug_in_an_optimizer_ends_a_run_in_one_sentence_and_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run({"trainer.steps": 2})
    run.directory = tmp_path / "run"
    raised = module_of("mplug_adamw.broken", "def step(*_, **__):\n    raise TypeError('no such piece')")
    monkeypatch.setattr(type(build(run).optimizer), "step", raised.step)
    with pytest.raises(PluginError, match=r"^optimizers/adamw failed in step 1, in step \(.*TypeError: no such piece"):
        train(run)
    log = (run.directory / "logs" / "rank0.log").read_text()
    assert "Traceback" in log
    assert "TypeError: no such piece" in log
    assert "optimizers/adamw failed in step 1" in log


def test_the_launcher_repeats_the_sentence_of_a_plugins_bug_and_names_the_rank() -> None:
    lines = Pipes(2)
    lines.ends.append((0.0, 1, ("PluginError", "extensions/falls failed in step 2")))
    error = lines.first_failure({})
    lines.close()
    assert isinstance(error, PluginError)
    assert re.fullmatch(r"rank 1 on \S+: extensions/falls failed in step 2", str(error))
