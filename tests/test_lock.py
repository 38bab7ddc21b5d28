"""The lock of a run's folder: which process gets it, which loses it, and what happens to a process that has lost it."""

import getpass
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
from mplug.errors import RunError, UsageError
from mplug.registry.hooks import HOST
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.loop import train
from mplug.training.metrics_writer import MetricsFile
from mplug_saving import lock, process
from mplug_saving.claiming import claim_new
from mplug_saving.folder import complete
from mplug_saving.lock import FOLDER, Baton, Claim, Lock, take
from mplug_saving.names import partial_path, path_of, step_of
from mplug_saving.process import Process
from mplug_saving.storage import FolderWriter
from mplug_testing.harness import tiny_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")

ELSEWHERE = Process("0123456789abcdef", 12, 34)
"""A process of another machine, or of another container."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundredths of the times of real locks."""
    for name, seconds in (("BEAT", 0.05), ("LEASE", 0.5), ("POLL", 0.01)):
        monkeypatch.setattr(lock, name, seconds)


def silent(sentence: str) -> None:
    raise AssertionError(f"nothing to wait for: {sentence}")


def waits(sentence: str) -> None:
    assert "waiting up to" in sentence


def dead() -> Process:
    """A process of this machine that has ended, and whose id another process may have got."""
    return replace(Process.this(), start=Process.this().start - 1)


def left_by(holder: Process, run: Path) -> Baton:
    """The lock as a process leaves it that is killed."""
    baton = Baton.of(holder, "abcdef", 7)
    (run / FOLDER).mkdir(parents=True)
    (run / FOLDER / baton.name).touch()
    described = {"host": "node7", "pid": holder.pid, "user": "ann", "command": "mplug train", "since": "yesterday"}
    (run / FOLDER / "holder.abcdef.json").write_text(json.dumps(described))
    return baton


def cut_off(run: Path) -> None:
    """The lock as a holder leaves it that is killed while it releases it."""
    (run / FOLDER / left_by(dead(), run).name).unlink()


def later_version(run: Path) -> None:
    """The lock of a version whose names this one cannot read."""
    (run / FOLDER).mkdir(parents=True)
    (run / FOLDER / "held.by-a-later-version").touch()


# Processes.


def test_a_process_runs_until_it_is_dead_also_while_nobody_asks_for_its_status() -> None:
    own = Process.this()
    assert own.runs()
    assert dead().runs() is False, "another process has its id now"
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
    asked = [*words, "from mplug_saving.process import Process; print(Process.this().place)"]
    found = subprocess.run(asked, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no namespaces here: {found.stderr}")
    assert found.stdout.strip() not in (Process.this().place, process.UNKNOWN)


# Taking and releasing.


FREE: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "a new folder": (lambda _: None, False),
    "of a dead holder": (lambda run: left_by(dead(), run), False),
    "whose release was cut off": (cut_off, False),
    "of a silent holder elsewhere": (lambda run: left_by(ELSEWHERE, run), True),
    "of a later version": (later_version, True),
}
"""Locks that can be taken: how they come about, and whether only after a lease, which is announced."""


@pytest.mark.parametrize("name", FREE)
def test_a_lock_without_a_living_holder_is_taken(tmp_path: Path, quick: None, name: str) -> None:
    (make, after_the_lease), run = FREE[name], tmp_path / "runs" / "first"
    make(run)
    messages, began = list[str](), time.monotonic()
    claim = take(run, messages.append)
    assert ["waiting up to" in message for message in messages] == [True] * after_the_lease
    assert not after_the_lease or time.monotonic() - began >= lock.LEASE
    own = {claim.baton.name, f"holder.{claim.baton.token}.json"}
    assert {path.name for path in (run / FOLDER).iterdir()} == own
    with pytest.raises(UsageError, match=f"is held by process {os.getpid()} on {os.uname().nodename}"):
        take(run, silent)
    claim.release()
    assert not run.exists(), "the run has not begun"


def test_a_holder_elsewhere_keeps_its_lock_while_its_baton_moves(tmp_path: Path, quick: None) -> None:
    claim = Claim(tmp_path, left_by(ELSEWHERE, tmp_path))
    messages: list[str] = []

    def beat(sentence: str) -> None:
        messages.append(sentence)
        claim.confirm()

    with pytest.raises(UsageError, match=r"process 12 on node7 \(ann: mplug train\), since yesterday"):
        take(tmp_path, beat)
    assert len(messages) == 1


def test_a_contender_whose_list_is_old_does_not_take_a_lock_that_has_moved(tmp_path: Path) -> None:
    """As on NFS, whose clients keep lists of folders for a minute."""
    seen = left_by(ELSEWHERE, tmp_path)
    Claim(tmp_path, seen).confirm()
    assert not lock._take_over(tmp_path / FOLDER, seen, Baton.of(Process.this(), "fedcba", 0))


def test_two_processes_may_confirm_one_claim(tmp_path: Path) -> None:
    claim = take(tmp_path, silent)
    copied = Claim(claim.directory, claim.baton)
    for one in (claim, claim, copied) * 3:
        one.confirm()
    claim.release()
    with pytest.raises(RunError, match=r"the lock of the run .* no longer exists"):
        copied.confirm()


def test_a_paused_holder_learns_that_it_has_lost_the_lock_and_leaves_the_new_one_alone(
    tmp_path: Path, quick: None
) -> None:
    paused = Claim(tmp_path, left_by(ELSEWHERE, tmp_path), lock._clock())
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
        except UsageError:
            claim = None
        results.put((number, claim is not None))
        barrier.wait()
        if claim is not None:
            claim.confirm()
            claim.release()


@pytest.mark.parametrize("rounds", [60, pytest.param(1500, marks=pytest.mark.wide("kills"))])
@pytest.mark.wide("kills")
def test_of_eight_processes_exactly_one_gets_a_lock(tmp_path: Path, rounds: int) -> None:
    """Free locks, locks of dead holders, locks whose release was cut off, and locks of silent holders elsewhere."""
    runs = [tmp_path / f"run{number}" for number in range(rounds)]
    for number, run in enumerate(runs):
        if number % 16 == 3:
            left_by(ELSEWHERE, run)
        elif number % 4 == 1:
            left_by(dead(), run)
        elif number % 4 == 2:
            cut_off(run)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(8), context.Queue()
    processes = [context.Process(target=compete, args=(barrier, results, runs)) for _ in range(8)]
    for one in processes:
        one.start()
    found = [results.get(timeout=120) for _ in range(8 * len(runs))]
    for one in processes:
        one.join()
    assert [one.exitcode for one in processes] == [0] * 8
    assert [found.count((number, True)) for number in range(rounds)] == [1] * rounds
    assert list(tmp_path.iterdir()) == []


# A block that holds a lock.


def test_a_block_keeps_its_lock_moving_and_releases_it_on_an_error_and_at_sigterm(tmp_path: Path, quick: None) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def block(end: Callable[[Claim], None]) -> None:
        with Lock(silent) as held:
            end(held.take(tmp_path / "run"))

    def fail(claim: Claim) -> None:
        first = claim.baton.beat
        while claim.baton.beat < first + 3:
            time.sleep(0.01)
        raise ValueError("over")

    with pytest.raises(ValueError, match="over"):
        block(fail)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        block(lambda _: signal.raise_signal(signal.SIGTERM))
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


STUCK = """
import hashlib, pathlib
from mplug_saving import lock
lock.STUCK = 0.1
with lock.Lock(print) as held:
    held.take(pathlib.Path("run"))
    print("held", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # many minutes, without a look at signals
"""


def test_sigterm_releases_the_lock_of_a_process_that_waits_in_c(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as stuck:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "held\n"
        stuck.terminate()
        assert stuck.wait(300) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


# Runs.


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


@pytest.mark.parametrize("moment", ["when step 3 begins", "in its save", "in its asynchronous save"])
@pytest.mark.wide("kills", quick=["in its asynchronous save"])
def test_a_run_that_has_been_taken_over_writes_no_metrics_and_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As if this process had been paused, and another one had taken the run over."""
    write = FolderWriter.write_data

    def lose() -> None:
        claim = run.claim
        assert claim is not None
        assert lock._take_over(tmp_path / FOLDER, claim.baton, Baton.of(ELSEWHERE, "abcdef", 0))
        claim.confirmed -= lock.LEASE

    def lose_while_writing(writer: FolderWriter, *arguments: Any) -> Any:
        if step_of(writer.final) == 3 and "save" in moment:
            lose()
        return write(writer, *arguments)

    class Loses:
        @hookimpl
        def step_started(self, run: Run) -> None:
            if run.step == 3 and "save" not in moment:
                lose()

    settings = {"trainer.steps": 4, "checkpoint.every": 1, "checkpoint.keep": 9}
    config = tiny_config({**settings, "checkpoint.asynchronous": "asynchronous" in moment})
    run = prepare(config, {f"{HOST}metrics": MetricsFile(), f"{HOST}loses": Loses()}, tmp_path)
    run.claim = take(tmp_path, silent)
    monkeypatch.setattr(FolderWriter, "write_data", lose_while_writing)
    with pytest.raises(RunError, match=r"another process took over the run .*process 12 holds it now"):
        train(run)
    assert [step_of(path) for path in complete(tmp_path / "checkpoints")] == [1, 2]
    if "save" in moment:
        assert partial_path(path_of(tmp_path / "checkpoints", 3)).is_dir(), "it may be the new holder's by now"
    else:
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


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
        before = {path: path.read_bytes() for path in (run / "config.yaml", run / "record.json")}
        holder = (
            "'runs/one' is held by process",
            f"on {os.uname().nodename} ({getpass.getuser()}: ",
            "mplug train --name one",
            "since 2",
        )
        for again in (words, ["train", "--resume"]):
            refused = cli(*again)
            assert refused.returncode == 2, refused.stdout
            assert [word for word in holder if word not in refused.stderr] == []
        assert {path: path.read_bytes() for path in before} == before
    finally:
        first.kill()
        first.communicate()
    last = step_of(complete(run / "checkpoints")[-1])
    resumed = cli("train", "--resume", "--set", f"trainer.steps={last + 2}")
    assert resumed.returncode == 0, resumed.stderr
    assert not (run / FOLDER).exists()
