"""Whole runs: resuming, stopping, and what they write."""

import logging
import math
import signal
from pathlib import Path

import pytest
from tiny_runs import NOISY, Stop, assert_same_run, checkpoints, metrics, prepared, trained

from mplug import UsageError, hookimpl
from mplug.config.defaults import saved_settings
from mplug.registry.entry_points import Registry
from mplug.registry.hooks import Hooks
from mplug.registry.resolve import resolve
from mplug.training.loop import Ending, train
from mplug.training.report import PendingRecord
from mplug_saving.names import path_of

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
