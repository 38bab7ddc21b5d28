"""How long a run takes to go on after the death of a process: from the kill to the end of the next step.

    python benchmarks/recovery.py [--layout dp2tp2] [--kills 3] [--device cuda] [--ways restart spares fewer]
                                  [--set section.field=value ...]

For each way, starts `mplug train`, kills the process of the last rank, and waits for the next line of metrics.jsonl;
that as often as is asked (once with `fewer`). The ways: `restart` starts all processes again from a checkpoint
(`--restarts`), `spares` replaces the dead process (`extensions.heal.spares`), and `fewer` goes on without it. On GPUs,
mplug refuses `spares`, and `fewer` of more than two processes. Linux only: a process is found by the log that it holds
open.
"""

import argparse
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SMALL = {
    "model.num_layers": 4,
    "trainer.seq_length": 64,
    "trainer.steps": 100000,
    "trainer.eval_every": 0,
    "trainer.log_every": 100000,
    "data.name": "mock",
}
WAYS = ("restart", "spares", "fewer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp2tp2")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    options = parser.parse_args()
    for way in options.ways:
        kills = 1 if way == "fewer" else options.kills
        seconds = measured(way, options.layout, kills, options.device, options.settings)
        print(f"{options.layout}, {way}: {statistics.median(seconds):.2f} s to recover (of {kills}: ", end="")
        print(", ".join(f"{value:.2f}" for value in seconds) + ")", flush=True)


def measured(way: str, layout: str, kills: int, device: str, further: list[str]) -> list[float]:
    """The seconds that a run takes to recover from each kill."""
    settings = {**SMALL, "trainer.device": device, "checkpoint.every": 5 if way == "restart" else 0}
    if way != "restart":
        settings |= {"extensions.heal.spares": kills if way == "spares" else 0, "extensions.heal.every": 5}
    last_rank = math.prod(map(int, re.findall(r"\d+", layout))) - 1
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mplug", "train", "--name", "one", "--parallel", layout]
        command += ["--restarts", str(kills)] if way == "restart" else []
        pairs = [f"{name}={value}" for name, value in settings.items()] + further
        command += [word for pair in pairs for word in ("--set", pair)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
            try:
                run = Path(folder) / "runs" / "one"
                return [recovery_seconds(run, last_rank, process) for _ in range(kills)]
            finally:
                process.send_signal(signal.SIGTERM)


def recovery_seconds(run: Path, rank: int, process: subprocess.Popen[bytes]) -> float:
    """Kill the process of a rank, and the seconds until rank 0 has begun again and done a step."""
    metrics, log = run / "metrics.jsonl", run / "logs" / "rank0.log"
    wait_until(process, lambda: lines(metrics) > 0)
    first = lines(metrics)
    wait_until(process, lambda: lines(metrics) >= first + 12)
    beginnings = lines(log, "began as rank")
    os.kill(worker(run, rank), signal.SIGKILL)
    began = time.monotonic()
    wait_until(process, lambda: lines(log, "began as rank") > beginnings)
    step = last_step(metrics)  # at most the last step before the death: the first line follows later
    wait_until(process, lambda: last_step(metrics) != step)
    dropped = last_step(metrics)
    if dropped < step:  # the steps that are repeated have been dropped
        wait_until(process, lambda: last_step(metrics) > dropped)
    return time.monotonic() - began


def wait_until(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.poll() is None, "the run has ended"
        time.sleep(0.005)


def lines(path: Path, word: str = "") -> int:
    text = path.read_text() if path.exists() else ""
    return sum(word in line for line in text.splitlines())


def last_step(metrics: Path) -> int:
    """The step of the last whole line; 0 without one."""
    steps = re.findall(r'^\{"step": (\d+),.*\}$', metrics.read_text(), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def worker(run: Path, rank: int) -> int:
    log = str((run / "logs" / f"rank{rank}.log").resolve())
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                opened = [os.readlink(path) for path in (folder / "fd").iterdir()]
            except OSError:
                continue
            if log in opened:
                return int(folder.name)
    raise AssertionError(f"no process has {log} open")


if __name__ == "__main__":
    main()
