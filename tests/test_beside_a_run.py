"""Reading checkpoints while a run or the file system changes them: all ranks raise the same error, and nothing that is
replaced or removed meanwhile is taken for damaged. Where a run continues after its processes have failed.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import safetensors
import torch
from checkpoints import SMALL
from click.testing import CliRunner

from mplug import hookimpl
from mplug.cli import main
from mplug.cli import train as command
from mplug.cli.train_start import Request, Start
from mplug.contracts.variance import Variance
from mplug.errors import RunError, UsageError
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.interrupt import Interrupt
from mplug.training.job import Outcome
from mplug.training.loop import train
from mplug_pretrained.inference import load_for_inference
from mplug_pretrained.weights import load_weights
from mplug_saving import Saving, opened, rank_exchanges, saver
from mplug_saving import folder as checkpoint
from mplug_saving.changes import Changes
from mplug_saving.folder import read_manifest
from mplug_saving.names import path_of
from mplug_saving.opened import Opened, open_together
from mplug_testing.harness import tiny_config

FILE = "rank00000.safetensors"


def trained(directory: Path, changes: dict[str, Any] | None = None, **plugins: object) -> Path:
    """A run of three steps with a checkpoint of each; that of the last."""
    named = {f"host/{name}": plugin for name, plugin in plugins.items()}
    run = prepare(tiny_config({**SMALL, "trainer.steps": 3, "checkpoint.keep": 3, **(changes or {})}), named, directory)
    train(run)
    return path_of(run.checkpoints, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("beside") / "runs" / "one").parents[1]


@pytest.fixture
def third(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The last checkpoint of a copy of that run, at its place in the folder of runs."""
    shutil.copytree(saved, tmp_path / "runs" / "one")
    monkeypatch.chdir(tmp_path)
    return path_of(tmp_path / "runs" / "one" / "checkpoints", 3)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


# Several ranks.


READS: dict[str, Callable[[Run, Opened], object]] = {
    "load": lambda run, one: saver.load(run, one, {}),
    "open_together": lambda run, one: open_together(run, one.path),
    "load_weights": lambda run, one: load_weights(run, cast(Any, SimpleNamespace(frozen={})), [], one.path),
}


@pytest.mark.parametrize("read", list(READS))
def test_what_one_rank_cannot_read_is_raised_on_all_ranks(
    third: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    one = open_together(prepare(tiny_config(SMALL)), third)
    run, sent = prepare(tiny_config({**SMALL, "parallel.layout": "dp2"})), list[int]()
    nothing, on_rank_1 = 3 * 2, 1  # a RunError is the first kind

    def beside_another(_: Run, number: int) -> int:
        sent.append(number)
        return min(number, on_rank_1)

    monkeypatch.setattr(rank_exchanges, "_least", beside_another)
    monkeypatch.setattr(rank_exchanges, "from_rank", lambda _, rank, value: value if rank == 0 else "no answer")
    with pytest.raises(RunError, match="rank 1: no answer"):
        READS[read](run, one)
    assert sent == [nothing]
    monkeypatch.setattr(saver, "verify", raising(RunError("this rank cannot read")))
    monkeypatch.setattr(opened, "read_with_checksum", raising(RunError("this rank cannot read")))
    with pytest.raises(RunError, match="rank 0: this rank cannot read"):
        READS[read](run, one)
    assert sent == [nothing, 0], "this rank has told the others before it raised"


def test_a_file_that_cannot_be_read_while_it_is_loaded_is_an_error_of_the_run(
    third: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "safe_open", raising(OSError(5, "Input/output error")))
    with pytest.raises(RunError, match=r"^rank 0: cannot read checkpoint '.*step_00000003': .*Input/output error"):
        load_for_inference(prepare(tiny_config(SMALL)), third)


# Beside a run.


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_loaded_as_the_new_one(
    third: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = saver.verify, list[Path]()

    def verify(path: Path, *arguments: Any) -> None:
        calls.append(path)
        if len(calls) == 1:
            trained(third.parents[1], {"trainer.seed": 7})
        original(path, *arguments)

    monkeypatch.setattr(saver, "verify", verify)
    model = load_for_inference(prepare(tiny_config(SMALL)), third)
    assert len(calls) == 2
    wanted = load_for_inference(prepare(tiny_config(SMALL)), third).parameters()
    assert all(torch.equal(values, wanted[name]) for name, values in model.parameters().items())
    (third / FILE).unlink()
    with pytest.raises(UsageError, match="is missing"):
        load_for_inference(prepare(tiny_config(SMALL)), third)


def test_verify_names_the_checkpoint_that_commands_use_in_the_place_of_a_damaged_one(third: Path) -> None:
    (third / FILE).write_bytes(b"\xff" * (third / FILE).stat().st_size)
    result = CliRunner().invoke(main, ["checkpoint", "verify"])
    assert result.exit_code == 2
    assert "step_00000003' is damaged" in result.output
    assert "remove it" not in result.output
    assert "commands skip damaged checkpoints; the newest valid one is that of step 2" in result.output


def test_verify_reports_every_problem_and_skips_what_is_removed_meanwhile(
    third: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, second = checkpoint.check_file, path_of(third.parent, 2)

    def check_file(path: Path, *arguments: Any) -> None:
        if path.name == "step_00000001":
            shutil.rmtree(path)
        if path == third:
            raise OSError(5, "Input/output error")
        original(path, *arguments)

    (second / FILE).write_bytes(b"\xff" * (second / FILE).stat().st_size)
    monkeypatch.setattr(checkpoint, "check_file", lambda path, *rest: check_file(path.absolute(), *rest))
    result = CliRunner().invoke(main, ["checkpoint", "verify"])
    assert result.exit_code == 2
    reports = ("step 1: the run has removed it meanwhile", "step_00000002' is damaged", "cannot read checkpoint")
    assert [words for words in reports if words not in result.output] == []
    shutil.rmtree(second)
    assert CliRunner().invoke(main, ["checkpoint", "verify"]).exit_code == 1, "what cannot be read is not damaged"


def test_a_reason_of_any_characters_is_saved_escaped(tmp_path: Path) -> None:
    class Rounds:
        @hookimpl
        def varies(self, config: object) -> Variance:
            return Variance("rounds\nto \x1b[2J bf16", 0.1, ())

    assert read_manifest(trained(tmp_path, rounds=Rounds()))["varies"] == {"host/rounds": r"rounds\nto \x1b[2J bf16"}


# After a failure.


def test_a_run_whose_last_step_is_saved_ends_with_its_error_and_is_not_restarted(third: Path) -> None:
    died = RunError("rank 1 has died")
    run: Any = SimpleNamespace(config=SimpleNamespace(trainer=SimpleNamespace(steps=3)))
    words = r"^rank 1 has died; the run is not restarted, because its 3 steps are complete, and '.*3'"
    with pytest.raises(RunError, match=words):
        Saving().readable_after(died, run, third)
    run.config.trainer.steps = 4
    found = Saving().readable_after(died, run, third)
    assert found is not None
    assert found.path == third
    assert Saving().readable_after(died, run, None) is None


def test_a_restart_says_that_it_begins_with_given_weights_again(
    third: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepare(tiny_config({**SMALL, "checkpoint.pretrained": str(third)}), directory=Path("runs/two"))
    ends = iter((RunError("rank 1 has died"), Outcome(Path("runs/two"), 3)))
    request = Request(name=None, resume=False, allowed=(), overrides={}, restarts=1)
    start = Start(request, None, run, {}, {}, None, None, third, Changes(), [], [], None)

    def launch(*_: object, **__: object) -> Outcome:
        end = next(ends)
        if isinstance(end, RunError):
            raise end
        return end

    monkeypatch.setattr("mplug.run.launching.launch", launch)
    assert command._work(start, None).step == 3
    assert f"rank 1 has died; continuing with the weights of '{third}' (restart 1 of 1)" in capsys.readouterr().err


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("what", ["the metrics", "the checkpoint"])
def test_one_rank_reads_the_metrics_and_one_of_each_machine_the_checkpoint_before_the_run_starts(
    third: Path, monkeypatch: pytest.MonkeyPatch, what: str, reads: bool
) -> None:
    rank, local_rank = (int(not reads), 0) if what == "the metrics" else (1, int(not reads))
    world = SimpleNamespace(rank=rank, local_rank=local_rank, restart=0, may_restart=False, launcher="srun", size=1)
    monkeypatch.setattr("mplug.run.launching.launched", lambda: world)
    following = raising(UsageError("the next check"))
    if what == "the metrics":
        (third.parents[1] / "metrics.jsonl").write_text('damaged\n{"step": 3}\n')
        monkeypatch.setattr(Saving, "readable", following)
    else:
        (third / "checkpoint.json").write_text("damaged")
        for step in (1, 2):
            shutil.rmtree(path_of(third.parent, step))
        monkeypatch.setattr("mplug.model.build.build_model", following)
    found = "is damaged" if what == "the metrics" else "no checkpoint in"
    result = CliRunner().invoke(main, ["train", "--resume", "--name", "one"])
    assert (found if reads else "the next check") in result.output


# Stopping at once.


def test_a_second_sigterm_ends_the_process_whatever_heard_the_signal_before_the_run() -> None:
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, lambda *_: None)  # as the lock's, which lets the process unwind
            run: Any = SimpleNamespace(rank=0, stop_requested=False)
            with Interrupt(run) as interrupt:
                interrupt.later(signal.SIGTERM)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
