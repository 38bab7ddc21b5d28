"""The command `mplug` in processes of its own, and what the runs that it starts leave behind."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from warm import Forked

from mplug_saving.names import path_of
from mplug_testing.harness import EXACT

SHAPE = {
    "model.num_layers": 4,
    "model.num_attention_heads": 4,
    "model.dropout": 0.1,
    "schedule.warmup_steps": 3,
    "schedule.decay_steps": 20,
    "trainer.steps": 20,
    "checkpoint.every": 5,
    "checkpoint.keep": 2,
    "data.path": "text.txt",
}
MPLUG = ("-m", "mplug")
TEXT = "".join(f"{a} times {b} is {a * b}.\n" for a in range(40) for b in range(26))
BEGUN: list["Command"] = []
PATIENCE = 900.0
"""Seconds until what waits is taken to wait for ever; a busy machine needs many more than a quiet one."""
Ended = subprocess.CompletedProcess[str]


# Commands and their processes.


@dataclass
class Command:
    """A command that runs, and where it writes, by which its processes and their children are known."""

    process: subprocess.Popen[str] | Forked
    output: str

    def pids(self) -> list[int]:
        """Its living processes and their children: those that write where it does."""
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and os.readlink(folder / "fd" / "1") == self.output:
                    found.append(int(folder.name))
        return found

    def worker(self, rank: int) -> int:
        """The process that writes the log of a rank."""
        for pid in self.pids():
            with suppress(OSError):
                opened = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
                if any(path.endswith(f"/logs/rank{rank}.log") for path in opened):
                    return pid
        raise AssertionError(f"no process is rank {rank}")

    def ended(self) -> Ended:
        """What it printed, once it and all its processes have ended."""
        out, err = self.process.communicate(timeout=PATIENCE)
        poll(lambda: not self.pids(), "its processes have ended")
        return Ended(self.process.args, self.process.returncode, out, err)

    def succeeded(self) -> Ended:
        """The same of a command that succeeds."""
        result = self.ended()
        assert result.returncode == 0, result.stderr
        assert "Traceback" not in result.stderr
        return result

    def refused(self, status: int, *words: str) -> Ended:
        """The same of a command that ends with a status, and one line on stderr that has all these words."""
        result = self.ended()
        assert result.returncode == status, result.stdout + result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert result.stderr.startswith("mplug: ")
        assert [word for word in words if word not in result.stderr] == [], result.stderr
        return result

    def kill_what_is_left(self) -> None:
        """After a test that failed: its processes are not the next test's business."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.returncode is None:
            self.process.communicate()


def poll(condition: Callable[[], Any], what: str) -> Any:
    """The condition's value as soon as it is true; AssertionError at the deadline."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}"
        time.sleep(0.01)
    return value


def begin(folder: Path, *words: str, machine: int | None = None, **environment: str) -> Command:
    """Start a command in a folder and in a session of its own: a module in a fork, mpirun in an interpreter."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    if words[0] == "-m":
        process = Forked(*words[1:], cwd=folder, environment=environment, session=True, machine=machine)
        BEGUN.append(Command(process, process.output))
    else:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, **pipes)
        assert started.stdout is not None
        BEGUN.append(Command(started, os.readlink(f"/proc/self/fd/{started.stdout.fileno()}")))
    return BEGUN[-1]


def train(folder: Path, name: str, *words: str, **environment: str) -> Command:
    return begin(folder, *MPLUG, "train", "--name", name, *words, **environment)


def free_port() -> str:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


Whole = Callable[[str], Path]
Same = Callable[[Path, Path], None]


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_bits(run: Path, reference: Path, assert_bitwise: Same) -> None:
    """Every step of the reference once with the same figures, and the same last checkpoint."""
    names = ("step", "loss", "grad_norm", "lr", "tokens")
    found, wanted = ([[line[name] for name in names] for line in metrics(path)] for path in (run, reference))
    assert found == wanted
    assert_bitwise(saved_at(run, 20), saved_at(reference, 20))


def assert_same_losses(run: Path, reference: Path) -> None:
    """Every step of the reference once, with its loss and gradient norm to rounding."""
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(reference)]
    for name in ("loss", "grad_norm"):
        found, wanted = ([line[name] for line in metrics(path)] for path in (run, reference))
        assert found == pytest.approx(wanted, rel=EXACT), name


def steps_saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir())


def saved_at(run: Path, step: int) -> Path:
    return path_of(run / "checkpoints", step)


SRUN = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def wait_for_steps(command: Command, run: Path, number: int) -> None:
    def there() -> bool:
        assert command.process.poll() is None, command.process.communicate()
        path = run / "metrics.jsonl"
        return path.exists() and path.read_text().count("\n") >= number

    poll(there, f"{run.name} has done {number} steps")
