"""The lock of a run's folder: who gets it, who loses it, and what happens to the one who has lost it."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from warm import Forked

from mplug import hookimpl
from mplug.checkpoint.folder import complete
from mplug.checkpoint.names import partial_path, path_of, step_of
from mplug.checkpoint.storage import FolderWriter
from mplug.cli.beginning import claim_new
from mplug.errors import RunError, UsageError
from mplug.registry.hooks import HOST
from mplug.run import lock, process
from mplug.run.lock import FOLDER, Baton, Claim, Lock, take
from mplug.run.prepare import prepare
from mplug.run.process import Process
from mplug.run.run import Run
from mplug.training.loop import train
from mplug.training.observers import MetricsFile
from mplug_testing.harness import tiny_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")

ELSEWHERE = "0123456789abcdef"
"""The place of processes of another machine, or of another container."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundredths of the times of real locks."""
    monkeypatch.setattr(lock, "BEAT", 0.05)
    monkeypatch.setattr(lock, "LEASE", 0.5)
    monkeypatch.setattr(lock, "POLL", 0.01)


def silent(sentence: str) -> None:
    raise AssertionError(f"nothing to wait for: {sentence}")


def waits(sentence: str) -> None:
    assert "waiting up to" in sentence


def left_by(holder: Process, run: Path) -> Baton:
    """The lock as a process leaves it that is killed."""
    baton = Baton.of(holder, "abcdef", 7)
    (run / FOLDER).mkdir(parents=True)
    (run / FOLDER / baton.name).touch()
    described = {"host": "node7", "pid": holder.pid, "user": "ann", "command": "mplug train", "since": "yesterday"}
    (run / FOLDER / "holder.abcdef.json").write_text(json.dumps(described))
    return baton


def dead() -> Process:
    """A process of this machine that has ended, and whose id another process may have got."""
    return replace(Process.this(), start=Process.this().start - 1)


# Processes.


def test_a_process_runs_until_it_is_dead_also_while_nobody_asks_for_its_status() -> None:
    own = Process.this()
    assert own.runs()
    assert replace(own, start=own.start - 1).runs() is False, "another process has its id now"
    child = subprocess.Popen(["sleep", "60"])
    other = replace(own, pid=child.pid, start=int(process._stat(child.pid)[process.START]))
    assert other.runs()
    child.kill()
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) is None:
        pass
    assert other.runs() is False, "a zombie"
    child.wait()
    assert other.runs() is False


def test_a_container_of_the_same_host_name_is_another_place() -> None:
    words = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    asked = [*words, "from mplug.run.process import Process; print(Process.this().place)"]
    found = subprocess.run(asked, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no namespaces here: {found.stderr}")
    assert found.stdout.strip() not in (Process.this().place, process.UNKNOWN)


# Taking and releasing.


def test_a_lock_that_is_held_names_its_holder_and_leaves_nothing_when_it_is_released(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    claim = take(run, silent)
    with pytest.raises(UsageError) as refused:
        take(run, silent)
    described = json.loads(next((run / FOLDER).glob("holder.*.json")).read_text())
    for word in (f"process {os.getpid()}", os.uname().nodename, described["user"], "mplug", described["since"]):
        assert word in str(refused.value)
    claim.release()
    assert not run.exists(), "the run has not begun"
    take(run, silent).release()


def test_a_holder_that_is_dead_loses_its_lock_at_once(tmp_path: Path) -> None:
    left_by(dead(), tmp_path)
    claim = take(tmp_path, silent)
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == {
        claim.baton.name,
        f"holder.{claim.baton.token}.json",
    }


@pytest.mark.parametrize("name", [f"held.{ELSEWHERE}.12.34.abcdef.7", "held.by-a-later-version"])
def test_a_silent_holder_elsewhere_loses_its_lock_after_the_lease_and_the_wait_is_announced(
    tmp_path: Path, quick: None, name: str
) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / name).touch()
    told: list[str] = []
    began = time.monotonic()
    take(tmp_path, told.append)
    assert time.monotonic() - began >= lock.LEASE
    assert len(told) == 1
    assert "waiting up to" in told[0]


def test_a_holder_elsewhere_keeps_its_lock_while_its_baton_moves(tmp_path: Path, quick: None) -> None:
    claim = Claim(tmp_path, left_by(Process(ELSEWHERE, 12, 34), tmp_path))
    told: list[str] = []

    def beat(sentence: str) -> None:
        told.append(sentence)
        claim.confirm()

    with pytest.raises(UsageError, match=r"process 12 on node7 \(ann: mplug train\), since yesterday"):
        take(tmp_path, beat)
    assert len(told) == 1


def test_a_contender_whose_list_is_old_does_not_take_a_lock_that_has_moved(tmp_path: Path) -> None:
    """As on NFS, whose clients keep lists of folders for a minute."""
    seen = left_by(Process(ELSEWHERE, 12, 34), tmp_path)
    Claim(tmp_path, seen).confirm()
    assert not lock._take_over(tmp_path / FOLDER, seen, Baton.of(Process.this(), "fedcba", 0))


def test_two_processes_may_confirm_one_claim(tmp_path: Path) -> None:
    claim = take(tmp_path, silent)
    copied = Claim(claim.directory, claim.baton)
    for _ in range(3):
        claim.confirm()
        claim.confirm()
        copied.confirm()
    claim.release()
    with pytest.raises(RunError, match=r"the lock of the run .* no longer exists"):
        copied.confirm()


def test_a_lock_without_a_baton_is_free(tmp_path: Path) -> None:
    """A holder was killed while it released the lock."""
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "holder.abcdef.json").touch()
    take(tmp_path, silent).confirm()


def test_a_paused_holder_learns_that_it_has_lost_the_lock_and_leaves_the_new_one_alone(
    tmp_path: Path, quick: None
) -> None:
    paused = Claim(tmp_path, left_by(Process(ELSEWHERE, 12, 34), tmp_path), lock._clock())
    paused.keep()  # it has just been confirmed
    holder = take(tmp_path, waits)
    for check in (paused.confirm, paused.keep):
        with pytest.raises(RunError, match=rf"another process took over.*process {os.getpid()} on .* holds it now"):
            check()
    paused.release()
    holder.confirm()


def test_a_file_system_that_fails_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = take(tmp_path, silent)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(RunError, match="cannot confirm the lock"):
        claim.confirm()
    claim.confirmed -= lock.LEASE
    claim.keep()  # a long step has ended, and the file system may answer again
    assert claim.failing is not None
    claim.failing -= lock.LEASE / 3
    claim.keep()
    claim.failing -= lock.LEASE / 3
    with pytest.raises(RunError, match="cannot confirm the lock"):
        claim.keep()
    monkeypatch.undo()
    claim.keep()
    monkeypatch.setattr(os, "rename", fail)
    claim.confirmed -= lock.LEASE
    claim.keep()  # it has answered since, so this is a first failure


# Many at once.


def compete(barrier: Any, results: Any, runs: list[Path]) -> None:
    lock.BEAT, lock.LEASE, lock.POLL = 0.05, 0.2, 0.002
    for number, run in enumerate(runs):
        barrier.wait()
        try:
            claim = take(run, waits)
            results.put((number, "taken"))
        except UsageError:
            claim = None
            results.put((number, "refused"))
        barrier.wait()
        if claim is not None:
            claim.confirm()
            claim.release()


@pytest.mark.parametrize("rounds", [60, pytest.param(1500, marks=pytest.mark.wide("kills"))])
def test_of_eight_processes_exactly_one_gets_a_lock(tmp_path: Path, rounds: int) -> None:
    """Free locks, locks of dead holders, locks whose release was cut off, and locks of silent holders elsewhere."""
    runs = [tmp_path / f"run{number}" for number in range(rounds)]
    for number, run in enumerate(runs):
        if number % 16 == 3:
            left_by(Process(ELSEWHERE, 12, 34), run)
        elif number % 4 == 1:
            left_by(dead(), run)
        elif number % 4 == 2:
            (run / FOLDER / left_by(dead(), run).name).unlink()
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(8), context.Queue()
    processes = [context.Process(target=compete, args=(barrier, results, runs)) for _ in range(8)]
    for one in processes:
        one.start()
    found = [results.get(timeout=120) for _ in range(8 * len(runs))]
    for one in processes:
        one.join()
    assert [one.exitcode for one in processes] == [0] * 8
    counted = [sum(what == (number, "taken") for what in found) for number in range(len(runs))]
    assert counted == [1] * len(runs)
    assert list(tmp_path.iterdir()) == []


# A block that holds a lock.


def test_a_block_keeps_its_lock_moving_and_releases_it_on_an_error(tmp_path: Path, quick: None) -> None:
    def block() -> None:
        with Lock(silent) as held:
            claim = held.take(tmp_path / "run")
            first = claim.baton.beat
            while claim.baton.beat < first + 3:
                time.sleep(0.01)
            raise ValueError("over")

    with pytest.raises(ValueError, match="over"):
        block()
    assert list(tmp_path.iterdir()) == []


def test_sigterm_in_a_block_releases_the_lock(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def block() -> None:
        with Lock(silent) as held:
            held.take(tmp_path / "run")
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        block()
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


STUCK = """
import hashlib, pathlib
from mplug.run import lock
lock.STUCK = 0.1
with lock.Lock(print) as held:
    held.take(pathlib.Path("run"))
    print("held", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # many minutes, without a look at signals
"""


def test_sigterm_releases_the_lock_of_a_process_that_waits_in_c(tmp_path: Path) -> None:
    stuck = subprocess.Popen([sys.executable, "-c", STUCK], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert stuck.stdout is not None
    assert stuck.stdout.readline() == "held\n"
    stuck.terminate()
    assert stuck.wait(300) == 128 + signal.SIGTERM
    stuck.stdout.close()
    assert list(tmp_path.iterdir()) == []


# Runs.


def run_with_lock(folder: Path, lose: Callable[[Run], None], changes: dict[str, Any]) -> None:
    """Train with the lock of a folder; `lose` is called at the start of every step."""

    class Loses:
        @hookimpl
        def step_started(self, run: Run) -> None:
            lose(run)

    config = tiny_config({"trainer.steps": 4, "checkpoint.every": 1, "checkpoint.keep": 9, **changes})
    run = prepare(config, {f"{HOST}metrics": MetricsFile(), f"{HOST}loses": Loses()}, folder)
    run.claim = take(folder, silent)
    train(run)


def test_runs_without_a_name_that_start_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = prepare(tiny_config({}), directory=Path("runs/gpt-20261122-231349"))
    assert run.directory is not None
    take(run.directory, silent)
    with Lock(silent) as held:
        with pytest.raises(UsageError, match="is held by process"):
            claim_new(held, run, "gpt-20261122-231349")
        assert claim_new(held, run, None).directory == run.directory == Path("runs/gpt-20261122-231349-2")


def lose_it(claim: Claim) -> None:
    """As if this process had been paused, and another one had taken the run over."""
    assert lock._take_over(claim.directory / FOLDER, claim.baton, Baton.of(Process(ELSEWHERE, 12, 34), "abcdef", 0))
    claim.confirmed -= lock.LEASE


def test_a_run_that_has_been_taken_over_writes_no_metrics_and_no_checkpoint(tmp_path: Path) -> None:
    def lose(run: Run) -> None:
        if run.step == 3:
            assert run.claim is not None
            lose_it(run.claim)

    with pytest.raises(RunError, match=r"another process took over the run .*process 12 holds it now"):
        run_with_lock(tmp_path, lose, {"checkpoint.asynchronous": False})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert [step_of(path) for path in complete(tmp_path / "checkpoints")] == [1, 2]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_during_which_the_run_is_taken_over_does_not_become_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    write, claims = FolderWriter.write_data, list[Claim]()

    def lose_while_writing(writer: FolderWriter, *arguments: Any) -> Any:
        if step_of(writer.final) == 3:
            lose_it(claims[0])
        return write(writer, *arguments)

    monkeypatch.setattr(FolderWriter, "write_data", lose_while_writing)
    with pytest.raises(RunError, match="another process took over the run"):
        run_with_lock(tmp_path, lambda run: claims.append(run.claim), {"checkpoint.asynchronous": asynchronous})  # type: ignore[arg-type]
    assert [step_of(path) for path in complete(tmp_path / "checkpoints")] == [1, 2]
    assert partial_path(path_of(tmp_path / "checkpoints", 3)).is_dir(), "it may be the new holder's by now"


def test_a_second_command_is_refused_while_a_run_goes_on_and_continues_it_once_it_is_killed(
    tmp_path: Path, tiny: list[str], text_file: Path, cli: Callable[..., Any]
) -> None:
    words = ["train", "--name", "one", *tiny, "--set", f"data.path={text_file}", "--set", "checkpoint.every=2"]
    run = tmp_path / "runs" / "one"
    first = Forked("mplug", *words, "--set", "trainer.steps=100000", cwd=tmp_path, environment={**os.environ})
    try:
        while not complete(run / "checkpoints"):
            assert first.poll() is None, first.communicate()
            time.sleep(0.01)
        before = {path.name: path.read_bytes() for path in (run / "config.yaml", run / "record.json")}
        for again in (words, ["train", "--resume"]):
            refused = cli(*again)
            assert refused.returncode == 2, refused.stdout
            for word in (
                "'runs/one' is held by process",
                f"on {os.uname().nodename} (",
                "mplug train --name one",
                "since 2",
            ):
                assert word in refused.stderr
        assert {name: (run / name).read_bytes() for name in before} == before
    finally:
        first.kill()
        first.communicate()
    last = step_of(complete(run / "checkpoints")[-1])
    resumed = cli("train", "--resume", "--set", f"trainer.steps={last + 2}")
    assert resumed.returncode == 0, resumed.stderr
    assert not (run / FOLDER).exists()
