"""Whole runs: gradients of several micro batches, their norm, clipping, and those that are not finite."""

import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import Stop, assert_bitwise, checkpoints, metrics, prepared, saved, trained
from torch import Tensor

from mplug import Optimizer, Piece, Run, RunError, StepResult, StepScalars, UsageError, hookimpl
from mplug.errors import Diverged
from mplug.model.build import build_model
from mplug.registry.hooks import Hooks
from mplug.training import loop
from mplug.training.assembly import Parts, _wrap, build
from mplug.training.report import PendingRecord
from mplug.training.stepper import DefaultStepper

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
