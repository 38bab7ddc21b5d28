"""How long a run that has recovery_seconds a worker takes to go on: from the kill to the first step that is done again.

    python benchmarks/recovery.py [--layout dp2tp2] [--kills 3] [--device cuda]

Starts `mplug train --restarts`, kills the worker of the last rank once a checkpoint is there, and waits for the next
line of metrics.jsonl; that as often as is asked. Linux only: the worker is found by the log that it holds open.
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
from pathlib import Path

SMALL = {
    "model.num_layers": 4,
    "trainer.seq_length": 64,
    "trainer.steps": 100000,
    "trainer.eval_every": 0,
    "trainer.log_every": 100000,
    "checkpoint.every": 5,
    "data.name": "mock",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp2tp2")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    last_rank = math.prod(map(int, re.findall(r"\d+", options.layout))) - 1
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mplug", "train", "--name", "one", "--parallel", options.layout]
        command += ["--restarts", str(options.kills)]
        command += [
            word
            for name, value in {**SMALL, "trainer.device": options.device}.items()
            for word in ("--set", f"{name}={value}")
        ]
        with subprocess.Popen(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
            seconds = [
                recovery_seconds(Path(folder) / "runs" / "one", last_rank, process) for _ in range(options.kills)
            ]
            process.send_signal(signal.SIGTERM)
    print(f"{options.layout}: {statistics.median(seconds):.1f} s to recover (of {options.kills}: ", end="")
    print(", ".join(f"{value:.1f}" for value in seconds) + ")")


def recovery_seconds(run: Path, rank: int, process: subprocess.Popen[bytes]) -> float:
    """Kill a rank's worker, and the seconds until a step is done again."""
    metrics = run / "metrics.jsonl"
    first = done(metrics)
    while done(metrics) < first + 12 or not list((run / "checkpoints").glob("step_*")):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(worker(run, rank), signal.SIGKILL)
    began = time.monotonic()
    time.sleep(0.5)  # lines that were being written arrive
    lines = done(metrics)
    while (found := done(metrics)) <= lines:  # first the steps that are to be repeated are dropped
        assert process.poll() is None
        lines = found
        time.sleep(0.01)
    return time.monotonic() - began


def done(metrics: Path) -> int:
    return metrics.read_text().count("\n") if metrics.exists() else 0


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
