"""Evaluations within a run, a batch that grows, and what a run warns of."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import NOISY, assert_same_run, figures, metrics, prepared, trained

from mplug import RankBatch, Stepper, hookimpl
from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.training.assembly import build
from mplug_estimates.settings import about_unused, about_warmup
from mplug_saving.names import path_of
from mplug_validation import evaluate

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
