"""The cost of the extensions that watch a run: the duration of a step without (A) and with them (B), A B A B.

    python benchmarks/watchers.py [--layout dp2] [--rounds 2] [--steps 60] [-- --preset 125m --set ...]

Each run is `mplug train` with the same settings; the words after `--` are added to the command. It prints the median
duration of a step of each run without its first ten steps, and the ratio of the means of both kinds of runs, also for
the fastest quarter of the steps, which other work on the machine disturbs least.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WATCHERS = {
    "extensions.stragglers": "{}",
    "extensions.nanwatch": "{}",
    "extensions.corruption": "{}",
    "extensions.gc": "{}",
    "extensions.watchdog.recorder": "2000",
}
BASE = {
    "trainer.eval_every": "0",
    "checkpoint.every": "0",
    "trainer.log_every": "100000",
    "data.name": "mock",
    "extensions.losspicture": "false",
    "extensions.watchdog.recorder": "0",
}
SKIPPED = 10


def durations(folder: Path, name: str, layout: str, steps: int, watched: bool, more: list[str]) -> list[float]:
    """The seconds of each step of a run, without the first ones."""
    settings = {**BASE, **(WATCHERS if watched else {}), "trainer.steps": str(steps + SKIPPED)}
    options = [word for field, value in settings.items() for word in ("--set", f"{field}={value}")]
    command = [sys.executable, "-m", "mplug", "train", "--name", name, "--parallel", layout, *options, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step_s"] for line in lines[SKIPPED:]]


def main() -> None:
    """Run A B A B, and print the durations and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("more", nargs="*")
    options = parser.parse_args()
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for watched in (False, True):
                name = f"{'with' if watched else 'without'}{number}"
                own = durations(Path(folder), name, options.layout, options.steps, watched, options.more)
                found[watched].append(own)
                print(f"{name}: median {1e3 * statistics.median(own):.2f} ms, mean {1e3 * statistics.mean(own):.2f} ms")
    for title, figure in (
        ("median", statistics.median),
        ("mean", statistics.mean),
        ("fastest quarter", lambda own: statistics.mean(sorted(own)[: len(own) // 4])),
    ):
        without, watched_ = (statistics.mean(figure(own) for own in found[kind]) for kind in (False, True))
        print(f"{title}: {1e3 * without:.2f} ms without, {1e3 * watched_:.2f} ms with: {watched_ / without:.4f}")


if __name__ == "__main__":
    main()
