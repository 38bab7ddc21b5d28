"""`mplug data preprocess` that is stopped, killed or lacks room: no data looks complete, and the job resumes."""

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("psutil")
pytest.importorskip("zstandard")

import psutil
from mplug_indexed.preprocess.job import Outcome, preprocess
from mplug_indexed.preprocess.sources import cut, find_sources
from preprocessed import DOCUMENTS, data_of, expected, job, leftovers, lines_of, written

from mplug import RunError, UsageError


@pytest.mark.parametrize("fails_at", [0, 7, 40])
def test_a_full_disk_gives_one_sentence_and_the_job_resumes_when_there_is_room(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    calls: list[int] = []
    before = os.fsync

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        before(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"cannot write '.*': No space left on device; free some space and"):
            preprocess(job(tmp_path / "out", texts))
    assert not (tmp_path / "out.idx").exists()
    outcome = preprocess(job(tmp_path / "out", texts))
    assert not [*tmp_path.rglob("*.partial")]
    made = max(fails_at - 1, 0) // 4  # files of a part, and their folder; the manifest is first
    assert outcome.resumed == min(made, len(list(cut(find_sources([str(texts)], None, None), 700))))
    assert data_of(tmp_path / "out") == expected(DOCUMENTS)


def test_existing_data_is_replaced_only_with_overwrite(tmp_path: Path, texts: Path) -> None:
    written(tmp_path / "out.bin", b"precious")
    with pytest.raises(UsageError, match=r"out\.bin' exists; use another --output, or add --overwrite to replace it"):
        preprocess(job(tmp_path / "out", texts))
    assert (tmp_path / "out.bin").read_bytes() == b"precious"
    preprocess(job(tmp_path / "out", texts, overwrite=True))
    assert data_of(tmp_path / "out") == expected(DOCUMENTS)


def test_a_second_process_that_writes_the_same_data_set_is_refused(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "out.parts").mkdir()
    with (tmp_path / "out.parts" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process is writing"):
            preprocess(job(tmp_path / "out", texts))


# Going on.


@pytest.fixture
def stopped(tmp_path: Path, texts: Path) -> Path:
    """The folder of the parts of a job that was stopped after its third part."""
    told: list[int] = []

    def stop(outcome: Outcome, done: int) -> None:
        told.append(done)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(job(tmp_path / "out", texts), stop)
    return tmp_path / "out.parts"


def test_parts_of_another_job_are_not_used(tmp_path: Path, stopped: Path) -> None:
    other = written(tmp_path / "other.jsonl", lines_of(DOCUMENTS[:60]))
    with pytest.raises(UsageError, match="unfinished job with different inputs and append_eod; finish that job"):
        preprocess(job(tmp_path / "out", other, append_eod=False))
    assert preprocess(job(tmp_path / "out", other, append_eod=False, overwrite=True)).resumed == 0
    assert data_of(tmp_path / "out") == expected(DOCUMENTS[:60], eod=False)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, texts: Path, stopped: Path, content: bytes) -> None:
    (stopped / "manifest.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"unfinished job with a damaged manifest; .* add --overwrite to start again"):
        preprocess(job(tmp_path / "out", texts))


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        *(("json", one) for one in (b"", b"[]", b"\xff", b'{"bad": [3]}', b'{"bad": []}')),
        ("idx", b"MMI"),
        ("bin", b"1"),
    ],
)
def test_a_damaged_part_is_made_again(tmp_path: Path, texts: Path, stopped: Path, suffix: str, content: bytes) -> None:
    (stopped / f"00000001.{suffix}").write_bytes(content)
    assert preprocess(job(tmp_path / "out", texts)).resumed == 2
    assert data_of(tmp_path / "out") == expected(DOCUMENTS)


def test_an_input_that_changes_during_the_job_is_refused(tmp_path: Path, texts: Path) -> None:
    begun = job(tmp_path / "out", texts)
    os.utime(texts, ns=(1, 1))
    with pytest.raises(UsageError, match="has changed while it was read"):
        preprocess(begun)
    assert not (tmp_path / "out.bin").exists()


KILLED = """
import os, pathlib, signal, sys
from mplug_indexed.preprocess.job import Job, preprocess
from mplug_indexed.preprocess.sources import find_sources
from mplug_tokenization import describe_tokenizer
point, before = int(sys.argv[3]), pathlib.Path.replace
def replace(self, target):
    global point
    point -= 1
    if point == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return before(self, target)
pathlib.Path.replace = replace
sources = find_sources([sys.argv[1]], None, None)
preprocess(Job(pathlib.Path(sys.argv[2]), sources, describe_tokenizer("bytes", {}), append_eod=True, chunk_size=3300))
"""
POINTS = 1 + 3 * 6 + 2 + 1 + 2 + 1
"""Renames of the whole job: the manifest, three files of each part, both files of the whole,
the tokenizer's record, both files again into their place, the report."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.wide("kills")) for seed in (1, 2, 3))])
def test_after_a_kill_at_any_moment_no_data_looks_complete_and_the_job_resumes(tmp_path: Path, seed: int) -> None:
    path = written(tmp_path / "t.jsonl", lines_of(DOCUMENTS))
    assert len(list(cut(find_sources([str(path)], None, None), 3300))) == 6
    first = random.Random(seed).randrange(1, POINTS - 3)
    for point in (first, POINTS - 1 - seed):  # and once while the parts are joined
        words = [sys.executable, "-c", KILLED, str(path), str(tmp_path / "out"), str(point)]
        finished = subprocess.run(words, capture_output=True, text=True)
        if finished.returncode == 0:  # so few renames were left
            break
        assert finished.returncode == -signal.SIGKILL, finished.stderr
        if (tmp_path / "out.idx").exists():
            assert data_of(tmp_path / "out") == expected(DOCUMENTS)
    preprocess(job(tmp_path / "out", path, chunk_size=3300, overwrite=finished.returncode == 0))
    assert data_of(tmp_path / "out") == expected(DOCUMENTS)
    assert leftovers(tmp_path) == []


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.wide("kills")
def test_no_process_outlives_a_kill_and_the_same_command_completes_the_job(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", lines_of(DOCUMENTS * 20))
    command = [sys.executable, "-m", "mplug", "data", "preprocess", str(path), "--output", str(tmp_path / "out")]
    command += ["--tokenizer", "bytes", "--append-eod", "--chunk-mib", "0.002", "--workers", "2"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while len(list(tmp_path.glob("out.parts/*.json"))) < 10:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(running.pid).children(recursive=True)
    running.kill()
    running.communicate()
    assert len(children) >= 2
    while any(map(is_alive, children)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "out.idx").exists()
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "continued an earlier run" in finished.stdout
    assert data_of(tmp_path / "out") == expected(DOCUMENTS * 20)


def test_a_worker_that_dies_gives_one_sentence_and_exit_status_1(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", lines_of(DOCUMENTS))
    code = (
        "import os, mplug_bytes\n"
        "mplug_bytes.ByteTokenizer.encode_batch = lambda self, texts: os._exit(9)\n"
        "import multiprocessing\n"
        "from mplug_indexed.preprocess import job\n"
        "class Fork(type(multiprocessing.get_context('fork'))):\n"
        "    def set_forkserver_preload(self, names): pass\n"
        "job.get_context = lambda name: Fork()\n"
        "from mplug.cli import main\n"
        f"main(['data', 'preprocess', {str(path)!r}, '--output', {str(tmp_path / 'out')!r}, '--tokenizer', 'bytes',"
        " '--chunk-mib', '0.002', '--workers', '2'])\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 1, finished.stderr
    assert finished.stderr.startswith("mplug: an encoding process died (killed, or out of memory)")
    assert not (tmp_path / "out.bin").exists()
