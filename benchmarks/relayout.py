"""What a live change of the layout takes and moves, beside a resume through a checkpoint, and whether the losses agree.

    python benchmarks/relayout.py [--layouts dp2tp2 tp4 pp2dp2 fsdp4] [--device cuda] [--set section.field=value ...]

Three runs of `mplug train` with the same settings: one under the first layout alone; one that `mplug runs relayout`
takes through all layouts; and one that is stopped at the same steps and resumed under the next layout. A pause is the
time from the last step under a layout to the first step under the next one, by the moments at which metrics.jsonl gets
their lines.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mplug_heal.requests import answer_to, ask

SETTINGS = {
    "model.num_layers": 4,
    "trainer.seq_length": 64,
    "trainer.eval_every": 0,
    "trainer.log_every": 100000,
    "checkpoint.every": 0,
    "data.name": "mock",
}


@dataclass
class Runs:
    """The runs of this comparison, in a folder."""

    folder: Path
    device: str
    settings: list[str]
    steps: int

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a run, or resume it."""
        command = [sys.executable, "-m", "mplug", "train", "--name", name, *words]
        if "--resume" not in words:
            changes = {**SETTINGS, "trainer.steps": self.steps, "trainer.device": self.device}
            pairs = [f"{key}={value}" for key, value in changes.items()] + self.settings
            command += [word for pair in pairs for word in ("--set", pair)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.DEVNULL)

    def records(self, name: str) -> list[dict[str, Any]]:
        """The steps that a run has done."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for(self, name: str, step: int, process: subprocess.Popen[bytes]) -> float:
        """Wait until a step has its line; the moment."""
        while not (found := self.records(name)) or found[-1]["step"] < step:
            if process.poll():
                raise SystemExit(f"the run '{name}' ended with status {process.returncode}")
            time.sleep(0.005)
        return time.monotonic()


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Any:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["dp2tp2", "tp4", "pp2dp2", "fsdp4"])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--every", type=int, default=20, help="steps under each layout, at least")
    parser.add_argument("--steps", type=int, default=0, help="steps of all runs; default: enough for all layouts")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    options = parser.parse_args()
    steps = options.steps or 4 * options.every * len(options.layouts)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), options.device, options.settings, steps)
        with ending(runs.start("alone", "--parallel", options.layouts[0])) as process:
            process.wait()
        live = list(relayouts(runs, options.layouts, options.every))
        resumed = list(resumes(runs, options.layouts, options.every))
        print(
            f"{'change':<20} {'steps':>6} {'building + moving':>18} {'pause':>8} {'pause of a resume':>18} {'MiB':>8}"
        )
        for change, pause, (_, through_files) in zip(changes(runs, "live"), live, resumed, strict=True):
            name = f"{change['old']} -> {change['new']}"
            print(
                f"{name:<20} {change['step']:>6} {change['seconds']:>16.2f} s {pause:>6.2f} s {through_files:>16.2f} s "
                f"{change['bytes'] / 2**20:>8.1f}"
            )
        print(f"largest relative difference of a loss from the undisturbed run: live {difference(runs, 'live'):.1e}, "
              f"resumed {difference(runs, 'resumed'):.1e}")  # fmt: skip


def relayouts(runs: Runs, layouts: Sequence[str], every: int) -> Any:
    """The pauses of a run that changes its layout while it trains, in seconds."""
    with ending(runs.start("live", "--parallel", layouts[0])) as process:
        for number, layout in enumerate(layouts[1:], 1):
            runs.wait_for("live", changed_at(runs, number - 1) + every, process)
            request = ask(runs.folder / "runs" / "live", layout)
            seen, last = 0, time.monotonic()
            while len(changes(runs, "live")) < number:
                answer = answer_to(runs.folder / "runs" / "live", request)
                if process.poll() is not None or (answer is not None and answer.outcome == "refused"):
                    raise SystemExit(f"'{layout}': {answer.sentence if answer else 'the run has ended'}")
                step = runs.records("live")[-1]["step"]
                if step != seen:
                    seen, last = step, time.monotonic()
                time.sleep(0.005)
            yield runs.wait_for("live", changes(runs, "live")[-1]["step"] + 1, process) - last
        process.wait()


def resumes(runs: Runs, layouts: Sequence[str], every: int) -> Any:
    """(last step, pause in seconds) of a run that is stopped and resumed under the next layout, at the same steps."""
    process = runs.start("resumed", "--parallel", layouts[0])
    for number, layout in enumerate(layouts[1:]):
        with ending(process):
            runs.wait_for("resumed", changes(runs, "live")[number]["step"], process)
            last = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait()
        step = runs.records("resumed")[-1]["step"]
        process = runs.start("resumed", "--resume", "--parallel", layout)
        yield step, runs.wait_for("resumed", step + 1, process) - last
    with ending(process):
        process.wait()


def changes(runs: Runs, name: str) -> list[dict[str, Any]]:
    path = runs.folder / "runs" / name / "record.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()).get("relayouts", []) if path.exists() else []
    return found


def changed_at(runs: Runs, number: int) -> int:
    return 0 if number == 0 else int(changes(runs, "live")[number - 1]["step"])


def difference(runs: Runs, name: str) -> float:
    alone, other = runs.records("alone"), runs.records(name)
    assert [one["step"] for one in alone] == [one["step"] for one in other]
    return max(abs(one["loss"] - two["loss"]) / abs(one["loss"]) for one, two in zip(alone, other, strict=True))


if __name__ == "__main__":
    main()
