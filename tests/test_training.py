"""Whole runs: accumulation, resuming, clipping, stopping, and what they write."""

import json
import logging
import math
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mplug import (
    Optimizer,
    Piece,
    RankBatch,
    Record,
    Run,
    RunError,
    Stepper,
    StepResult,
    StepScalars,
    UsageError,
    hookimpl,
)
from mplug.config.defaults import default_settings, saved_settings
from mplug.config.sources import read_assignments
from mplug.errors import Diverged
from mplug.model.build import build_model
from mplug.registry.entry_points import Registry
from mplug.registry.hooks import Hooks
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.training import loop
from mplug.training.assembly import Parts, _wrap, build
from mplug.training.loop import Ending, train
from mplug.training.metrics_writer import MetricsFile
from mplug.training.report import PendingRecord
from mplug.training.stepper import DefaultStepper
from mplug_estimates.settings import about_unused, about_warmup
from mplug_saving.names import path_of, step_of
from mplug_validation import evaluate

NOISY = ["model.dropout=0.1", "model.attention_dropout=0.1"]


@pytest.fixture(autouse=True)
def no_handler_outlives_its_run() -> Iterator[None]:
    """Logs of runs in this process are closed with their test."""
    logger = logging.getLogger("mplug")
    before = list(logger.handlers)
    yield
    for handler in set(logger.handlers) - set(before):
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture
def fields(tiny: list[str], text_file: Path) -> list[str]:
    """The tiny run on the small text, as assignments."""
    return [*(word for word in tiny if word != "--set"), f"data.path={text_file}", "schedule.warmup_steps=3"]


def prepared(directory: Path | None, fields: Iterable[str], *changes: str, **plugins: object) -> Run:
    config = resolve(Registry(), default_settings(), read_assignments([*fields, *changes]))
    named = {f"host/{name}": plugin for name, plugin in plugins.items()}
    return prepare(config, {"host/metrics": MetricsFile(), **named}, directory)


def trained(
    directory: Path, fields: Iterable[str], *changes: str, resume_from: Path | None = None, **plugins: object
) -> Ending:
    return train(prepared(directory, fields, *changes, **plugins), resume_from)


def metrics(directory: Path) -> list[Record]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def figures(directory: Path) -> list[tuple[int, float, float, float, int]]:
    """What of each step does not depend on the clock."""
    return [tuple(line[name] for name in ("step", "loss", "grad_norm", "lr", "tokens")) for line in metrics(directory)]


def saved(directory: Path, step: int) -> dict[str, Tensor]:
    tensors = load_file(path_of(directory / "checkpoints", step) / "rank00000.safetensors")
    assert {name.split("/")[1].split("@")[0] for name in tensors} > {"weight"}, "weights and optimizer state"
    return tensors


def assert_bitwise(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_run(one: Path, other: Path, step: int) -> None:
    assert figures(one) == figures(other)
    assert_bitwise(saved(one, step), saved(other, step))


def checkpoints(directory: Path) -> list[int]:
    return sorted(step_of(path) for path in (directory / "checkpoints").iterdir())


# The same numbers.


def test_accumulating_micro_batches_gives_the_numbers_of_one_batch(tmp_path: Path, fields: list[str]) -> None:
    fields = [*fields, "model.dropout=0.1", "trainer.steps=6", "trainer.precision=fp64"]
    for size in (1, 2, 4):
        trained(tmp_path / str(size), fields, f"trainer.micro_batch_size={size}")
    found = [[(line["loss"], line["grad_norm"]) for line in metrics(tmp_path / str(size))] for size in (1, 2, 4)]
    for one in found[:2]:
        assert one == [pytest.approx(step, rel=1e-10) for step in found[2]]


def test_accumulation_divides_by_all_targets_once_however_they_are_spread(tmp_path: Path, fields: list[str]) -> None:
    run = prepared(None, fields)
    parts = build(run)
    whole, *_ = parts.train_loader.loader.take(2)
    labels = whole["labels"].clone()
    labels[0, 3:] = -100  # 3 targets in the first sample, 32 in the second
    batch = {**whole, "labels": labels}
    halves = [{name: v if len(v) == 1 else v[n : n + 1] for name, v in batch.items()} for n in (0, 1)]
    results = []
    for micro_batches in ([batch], halves):
        stepper = descending(run, parts, max_norm=0.0)
        stepper.forward_backward(parts.train_loader.step_of(micro_batches), 1)
        results.append(stepper.update(0.0, 0.0))
    assert [int(result.tokens) for result in results] == [35, 35]
    assert float(results[0].loss) == pytest.approx(float(results[1].loss), rel=1e-6)
    assert float(results[0].grad_norm) == pytest.approx(float(results[1].grad_norm), rel=1e-6)


# Resuming.


OTHER_MODELS = ["model.num_layers=1", "model.num_layers=3", "model.tie_embeddings=true", "model.qk_norm=false"]
OTHER_MODELS += ["model.hidden_size=64", "model.bias=true"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, fields: list[str]) -> None:
    trained(tmp_path / "one", fields, "trainer.steps=2")
    for other in OTHER_MODELS:
        with pytest.raises(UsageError, match="step_00000002"):
            trained(tmp_path / "other", fields, other, resume_from=path_of(tmp_path / "one" / "checkpoints", 2))


def test_a_run_of_an_older_version_resumes_with_the_defaults_of_newer_fields(tmp_path: Path, fields: list[str]) -> None:
    trained(tmp_path, fields, "trainer.steps=1")
    saved_config = tmp_path / "config.yaml"
    older = [line for line in saved_config.read_text().splitlines() if not line.strip().startswith("deterministic:")]
    saved_config.write_text("\n".join(older) + "\n")
    assert resolve(Registry(), saved_settings(tmp_path), {}).trainer.deterministic is False


class Stop:
    """Sends the process signals while a step runs."""

    def __init__(self, step: int, *numbers: int) -> None:
        self.step, self.numbers = step, numbers

    @hookimpl
    def step_started(self, run: Run) -> None:
        for number in self.numbers if run.step == self.step else ():
            os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("numbers", "late"), [([signal.SIGTERM] * 2, False), ([signal.SIGINT], False), ([signal.SIGTERM], True)]
)
@pytest.mark.wide("kills", quick=["numbers2-True"])
def test_a_signal_ends_the_run_after_the_whole_step_which_is_saved_and_goes_on_bitwise(
    tmp_path: Path, fields: list[str], monkeypatch: pytest.MonkeyPatch, numbers: list[int], late: bool
) -> None:
    """One stop that reaches a process twice is one. A run that hears of it a step late ends after that step."""
    whole, stopped, last = tmp_path / "whole", tmp_path / "stopped", 6 if late else 5
    fields = [*fields, *NOISY, "trainer.steps=12"]
    trained(whole, fields)
    if late:
        monkeypatch.setattr(PendingRecord, "ready", False)
    before = signal.getsignal(numbers[0])
    assert trained(stopped, fields, stop=Stop(5, *numbers)) == Ending(None, numbers[0])
    assert signal.getsignal(numbers[0]) is before
    assert checkpoints(stopped) == [last]
    assert [line["step"] for line in metrics(stopped)] == list(range(1, last + 1))
    trained(stopped, fields, resume_from=path_of(stopped / "checkpoints", last))
    assert_same_run(stopped, whole, 12)


# The update.


class Descent(Optimizer):
    """w -= lr scale g: what is applied can be read off the weights."""

    needs = "elements"

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces

    def step(self, scalars: StepScalars) -> None:
        if not scalars.skip:
            for piece in self.pieces:
                piece.master.sub_(scalars.lr * scalars.scale * piece.gradient)

    def state(self, piece: Piece) -> dict[str, Tensor]:
        return {}


def descending(run: Run, parts: Parts, max_norm: float) -> DefaultStepper:
    optimizer: Any = Descent(parts.pieces)
    stepper = DefaultStepper(run, parts.model, parts.pieces, optimizer)
    stepper.max_norm = max_norm
    return stepper


def flat_weights(parts: Parts) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in parts.model.parameters().values()])


def applied(fields: list[str], max_norm: float) -> tuple[Tensor, StepResult]:
    """What one step of rate 1 subtracts from the weights."""
    run = prepared(None, fields)
    parts = build(run)
    before, stepper = flat_weights(parts), descending(run, parts, max_norm)
    stepper.forward_backward(parts.train_loader.take(4), 1)
    result = stepper.update(1.0, 0.0)
    return before - flat_weights(parts), result


def test_the_gradient_norm_is_that_of_the_mean_loss(fields: list[str]) -> None:
    run = prepared(None, fields)
    parts = build(run)
    batches = list(parts.train_loader.take(4))
    stepper = descending(run, parts, 0.0)
    stepper.forward_backward(batches, 1)
    result = stepper.update(0.0, 0.0)
    parameters = list(parts.model.parameters().values())
    for parameter in parameters:
        del parameter.main_grad  # type: ignore[attr-defined]
    sums = [parts.model.loss({**batch, "keys": batch["sample_ids"]}) for batch in batches]
    mean = torch.stack([loss for loss, _ in sums]).sum() / (4 * 32)
    gradients = torch.autograd.grad(mean, parameters)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    assert float(result.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert float(result.loss) == pytest.approx(mean.item(), rel=1e-6)
    assert int(result.tokens) == 4 * 32


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_clipping_bounds_the_gradient_that_is_applied_and_keeps_its_direction(
    fields: list[str], max_norm: float
) -> None:
    whole, unclipped = applied(fields, 0.0)
    clipped, result = applied(fields, max_norm)
    norm = float(unclipped.grad_norm)
    assert norm > 1.0
    assert float(whole.norm()) == pytest.approx(norm, rel=1e-4)
    assert float(result.grad_norm) == norm, "reported as it was"
    assert float(clipped.norm()) == pytest.approx(min(max_norm, norm), rel=1e-3)
    assert float(torch.cosine_similarity(whole, clipped, dim=0)) == pytest.approx(1.0, abs=1e-4)
    if max_norm > norm:
        torch.testing.assert_close(clipped, whole, rtol=1e-5, atol=1e-8)


# Losses that are not finite.


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_what_was_before(tmp_path: Path, fields: list[str]) -> None:
    with pytest.raises(RunError, match="step 2 has a loss of"):
        trained(tmp_path, fields, "optimizer.lr=1e30", "schedule.warmup_steps=0", "checkpoint.every=1")
    assert [line["step"] for line in metrics(tmp_path)] == [1]
    assert checkpoints(tmp_path) == [1]


@pytest.fixture
def infinite_at_step_3(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DefaultStepper.update

    def update(self: DefaultStepper, *rates: float) -> StepResult:
        if self.run.step == 3:
            self.sinks.arena[3] = math.inf
        return original(self, *rates)

    monkeypatch.setattr(DefaultStepper, "update", update)


@pytest.mark.usefixtures("infinite_at_step_3")
def test_a_step_that_is_not_finite_is_left_out_by_choice(tmp_path: Path, fields: list[str]) -> None:
    saving = ("checkpoint.every=1", "checkpoint.keep=9")
    trained(tmp_path, fields, "trainer.steps=5", "trainer.nonfinite=skip", *saving)
    lines = metrics(tmp_path)
    assert [line["skipped"] for line in lines] == [False, False, True, False, False]
    assert lines[2]["grad_norm"] is None, "JSON has no infinity"
    assert all(math.isfinite(line["grad_norm"]) for line in lines if not line["skipped"])
    assert_bitwise(saved(tmp_path, 2), saved(tmp_path, 3))
    after = saved(tmp_path, 5)
    assert {float(t) for name, t in after.items() if name.endswith("/step@")} == {4.0}
    assert not torch.equal(after["head.norm.weight/weight@0"], saved(tmp_path, 3)["head.norm.weight/weight@0"])


@pytest.mark.usefixtures("infinite_at_step_3")
def test_what_is_heard_a_step_late_has_changed_no_weight_meanwhile(
    tmp_path: Path, fields: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the host reads a step's figures when it has launched the next."""
    built: list[Parts] = []
    monkeypatch.setattr(PendingRecord, "ready", False)
    monkeypatch.setattr(loop, "build", lambda run: built.append(build(run)) or built[-1])
    fields = [*fields, "trainer.steps=9"]
    with pytest.raises(Diverged, match="step 3 has a loss of"):
        trained(tmp_path / "diverged", fields)
    assert [line["step"] for line in metrics(tmp_path / "diverged")] == [1, 2]
    trained(tmp_path / "before", fields, stop=Stop(1, signal.SIGTERM))  # it hears of that after the second step
    for one, other in zip(built[0].pieces, built[1].pieces, strict=True):
        assert torch.equal(one.master, other.master)


class Sums:
    """A strategy that says that it sums gradients over an axis while backward runs."""

    def __init__(self, axis: str) -> None:
        self.axis = axis

    @hookimpl
    def wrap_model(self, model: Any) -> None:
        model.sinks.reduced_over.add(self.axis)


def test_two_strategies_may_sum_the_gradients_of_different_parameters_and_not_of_the_same(
    tmp_path: Path, fields: list[str]
) -> None:
    """Different ones are those of experts and of everything else, which lie in different views of the mesh."""
    run = prepared(tmp_path, fields)
    model = build_model(run)
    model._sinks = SimpleNamespace(reduced_over=set())  # type: ignore[assignment]
    names = list(model.placements)
    partial_axes = {name: ("near",) if "mlp" in name else ("far",) for name in names}
    trained = SimpleNamespace(trainable=True)
    model.placements = {
        name: SimpleNamespace(partial_axes=partial_axes[name], parameter=trained)  # type: ignore[misc]
        for name in names
    }
    run.hooks = Hooks({**run.hooks.plugins, "test/one": Sums("near"), "test/other": Sums("far")})
    _wrap(run, model)
    assert model.sinks.reduced_over == {"near", "far"}
    run.hooks = Hooks({**run.hooks.plugins, "test/third": Sums("farther")})
    model.placements[names[0]].partial_axes += ("farther",)
    model.sinks.reduced_over.clear()
    with pytest.raises(UsageError, match="axes far and farther both sum gradients"):
        _wrap(run, model)
    run.hooks = Hooks({"test/one": Sums("here"), "test/other": Sums("there")})  # axes that no placement names
    with pytest.raises(UsageError, match="axes here and there both sum gradients"):
        _wrap(run, model)


def test_an_observer_that_fails_is_told_of_once_on_the_terminal(
    tmp_path: Path, fields: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails:
        @hookimpl
        def step_finished(self) -> None:
            raise KeyError("nothing")

    run = prepared(tmp_path, fields)
    run.hooks = Hooks({**run.hooks.plugins, "extensions/fails": Fails()})
    train(run)
    messages = [line for line in capsys.readouterr().err.splitlines() if "extensions/fails" in line]
    assert messages == [
        "mplug: observer 'extensions/fails' failed in step_finished; the run continues; its log has the traceback"
    ]


# What a run writes.


def test_every_step_has_a_line_with_the_documented_fields(tmp_path: Path, fields: list[str]) -> None:
    trained(tmp_path, fields, "trainer.steps=5", "trainer.eval_every=2", "trainer.eval_samples=3")
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    documented = {"step", "loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s", "tflops", "mfu"}
    documented |= {"memory_gib", "data_wait_s", "skipped", "targets_per_s"}
    for line in lines:
        evaluated = {"val_loss"} if line["step"] in (2, 4, 5) else set()
        assert set(line) == documented | evaluated
        assert line["tokens"] == line["step"] * 4 * 32
        assert all(math.isfinite(line[name]) and line[name] > 0 for name in ("loss", "grad_norm", "tokens_per_s"))
        assert 0.01 < line["memory_gib"] < 64
        assert line["targets_per_s"] == line["tokens_per_s"]  # every token of a text is a target
        assert line["data_wait_s"] >= 0
        assert line["skipped"] is False
        assert line["mfu"] is None  # the peak of this processor is not known
        seconds = line["step_s"]
        assert line["tokens_per_s"] == pytest.approx(4 * 32 / seconds)
        # 2 blocks of 12 x 32² weights, an output of 32 x 256, and attention counted once
        flops = 4 * 32 * 6 * (2 * 12 * 32**2 + 32 * 256) + 6 * 2 * 32 * 4 * 32**2
        assert line["tflops"] == pytest.approx(flops / seconds / 1e12, rel=1e-6)
    assert [line["lr"] for line in lines[:3]] == pytest.approx([0.005 / 3, 0.01 / 3, 0.005])


def test_a_run_leaves_the_processs_loggers_as_it_found_them(tmp_path: Path, fields: list[str]) -> None:
    logger = logging.getLogger("mplug")
    before = (list(logger.handlers), logger.level)
    trained(tmp_path / "one", fields)
    assert (logger.handlers, logger.level) == before
    logged = (tmp_path / "one" / "logs" / "rank0.log").read_text()
    trained(tmp_path / "two", fields)
    assert (tmp_path / "one" / "logs" / "rank0.log").read_text() == logged


# Evaluation.


def test_evaluation_is_the_mean_over_all_tokens_of_its_samples_and_the_same_each_time(fields: list[str]) -> None:
    run = prepared(None, fields, *NOISY, "trainer.eval_every=1", "trainer.eval_samples=5")
    parts = build(run)
    found, loader = evaluate(run, parts), build(run).validation_loader
    assert loader is not None
    parts.model.module.eval()
    with torch.no_grad():
        sums = [parts.model.loss({**batch, "keys": batch["sample_ids"]}) for batch in loader.take(5)]
    assert sum(int(count) for _, count in sums) == 5 * 32
    assert found == pytest.approx(sum(float(loss) for loss, _ in sums) / (5 * 32), rel=1e-6)
    list(parts.train_loader.take(8))
    assert evaluate(run, parts) == found
    parts.stepper.forward_backward(parts.train_loader.take(4), 1)
    parts.stepper.update(0.1, 0.0)
    assert evaluate(run, parts) != found


def test_evaluating_does_not_change_the_training(tmp_path: Path, fields: list[str]) -> None:
    trained(tmp_path / "silent", fields, *NOISY)
    trained(tmp_path / "evaluated", fields, *NOISY, "trainer.eval_every=1")
    assert_same_run(tmp_path / "silent", tmp_path / "evaluated", 4)


# The growing batch.


class Recording:
    """Puts a stepper around the host's that writes down the samples of every step."""

    def __init__(self) -> None:
        self.samples: dict[int, list[list[int]]] = {}

    @hookimpl
    def build_stepper(self, default: Stepper) -> Stepper:
        around = default.forward_backward

        def forward_backward(micro_batches: Iterable[RankBatch], step: int) -> None:
            batches = list(micro_batches)
            self.samples[step] = [batch["sample_ids"].tolist() for batch in batches]
            around(batches, step)

        default.forward_backward = forward_backward  # type: ignore[method-assign]
        return default


GROWING = ["schedule.batch_rampup.start=2", "schedule.batch_rampup.increment=2", "schedule.batch_rampup.samples=8"]


def test_a_growing_batch_consumes_every_sample_once_and_in_order(tmp_path: Path, fields: list[str]) -> None:
    recording = Recording()
    fields = [*fields, *GROWING, "trainer.global_batch_size=6", "trainer.steps=5", "checkpoint.every=2"]
    trained(tmp_path / "whole", fields, recording=recording)
    # Two increases over 8 samples: 2 samples a step, from 4 samples on 4, from 8 on 6.
    assert recording.samples == {
        1: [[0, 1]],
        2: [[2, 3]],
        3: [[4, 5], [6, 7]],
        4: [[8, 9], [10, 11], [12, 13]],
        5: [[14, 15], [16, 17], [18, 19]],
    }
    lines = metrics(tmp_path / "whole")
    assert [line["tokens"] for line in lines] == [32 * samples for samples in (2, 4, 8, 14, 20)]
    resumed = Recording()
    middle = path_of(tmp_path / "whole" / "checkpoints", 4)
    trained(tmp_path / "resumed", fields, resume_from=middle, recording=resumed)
    assert resumed.samples == {5: recording.samples[5]}
    assert figures(tmp_path / "resumed") == figures(tmp_path / "whole")[4:]


def test_a_run_that_ends_with_a_loss_far_above_a_uniform_guess_warns(
    tmp_path: Path, fields: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "a", fields, "trainer.steps=1", "trainer.eval_every=0")
    assert "uniform guess" not in capfd.readouterr().err
    monkeypatch.setattr("mplug_estimates.course.FAR_ABOVE", 0.5)
    trained(tmp_path / "b", fields, "trainer.steps=1", "trainer.eval_every=0")
    assert "is far above 5.545, the loss of a uniform guess among 256 tokens" in capfd.readouterr().err
    assert "far above 5.545" in (tmp_path / "b" / "logs" / "rank0.log").read_text()


def test_a_run_that_ends_within_its_warm_up_says_how_far_the_rate_gets() -> None:
    def lines(*changes: str) -> list[str]:
        config = resolve(Registry(), default_settings(), read_assignments(changes))
        return about_warmup(SimpleNamespace(config=config))  # type: ignore[arg-type]

    assert lines() == lines("trainer.steps=50", "schedule.warmup_steps=50") == []
    (line,) = lines("trainer.steps=4")
    assert line.startswith("the warm-up has 50 steps and the run 4, so the learning rate only reaches 0.0004 of 0.005;")


def test_settings_of_plugins_that_the_run_does_not_use_are_said_to_have_no_effect() -> None:
    def lines(*changes: str) -> list[str]:
        overrides = read_assignments(changes)
        config = resolve(Registry(), default_settings(), overrides)
        return about_unused(SimpleNamespace(config=config), overrides)  # type: ignore[arg-type]

    chosen = ("parallel.layout=pp2", "parallel.pp.schedule=gpipe", "parallel.dp.bucket_mib=4", "memory.recompute={}")
    assert lines(*chosen) == []
    assert lines(*chosen, "parallel.ep.dispatch=bounded", "parallel.ep.room=2", "kernels.fla.variants=2") == [
        "parallel.ep.dispatch (--set) and parallel.ep.room (--set) have no effect: the run does not use parallel/ep",
        "kernels.fla.variants (--set) has no effect: the run does not use kernels/fla",
    ]
