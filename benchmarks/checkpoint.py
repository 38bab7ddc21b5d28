"""What saving costs a run: how long training waits, synchronously and asynchronously, and how long until it is seen.

    python benchmarks/checkpoint.py [--hidden-size 512] [--num-layers 8] [--saves 5] [--folder DIR]

One process trains a GPT on random tokens and saves between steps, in turn with and without training going on. The
asynchronous save is blocked while it copies the state to the host's memory; the first one also allocates that copy,
and is left out of the medians (it is printed). Times depend on the disk: DIR chooses it.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from mplug.cli.tables import human_bytes, table
from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug_saving.position import Position


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(options, Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> None:
    modes = {mode: prepared(options, folder / mode, mode == "asynchronous") for mode in ("synchronous", "asynchronous")}
    parts = build(modes["synchronous"])
    positions = {mode: Position(run, parts) for mode, run in modes.items()}
    blocked: dict[str, list[float]] = {mode: [] for mode in modes}
    visible: dict[str, list[float]] = {mode: [] for mode in modes}
    steps: dict[str, list[float]] = {"nothing is being saved": [], "it is being saved": []}
    size = 0
    for save in range(options.saves + 1):
        for mode, run in modes.items():
            steps["nothing is being saved"].append(step(run, parts))
            run.step = save + 1
            began = time.perf_counter()
            positions[mode].save()
            blocked[mode].append(time.perf_counter() - began)
            while not (saved := positions[mode].saver.saved()):
                steps["it is being saved"].append(step(run, parts))
            visible[mode].append(time.perf_counter() - began)
            size = sum(file.stat().st_size for file in saved[0].iterdir())
    print(f"{parts.num_parameters:,} parameters, {human_bytes(size)} a checkpoint, {options.saves} saves each\n")
    rows = [
        (
            mode,
            *map(seconds, (statistics.median(blocked[mode][1:]), min(blocked[mode][1:]), max(blocked[mode][1:]))),
            seconds(blocked[mode][0]),
            seconds(statistics.median(visible[mode][1:])),
        )
        for mode in modes
    ]
    print(table(("SAVE", "BLOCKED", "MIN", "MAX", "THE FIRST", "VISIBLE AFTER"), rows))
    ratio = statistics.median(blocked["asynchronous"][1:]) / statistics.median(blocked["synchronous"][1:])
    print(f"\nblocked, asynchronous over synchronous: {ratio:.3f}")
    for when, times in steps.items():
        if times:
            print(f"a step while {when}: {seconds(statistics.median(times))} (of {len(times)})")


def prepared(options: argparse.Namespace, folder: Path, asynchronous: bool) -> Run:
    fields = {
        "model.hidden_size": options.hidden_size,
        "model.num_layers": options.num_layers,
        "model.num_attention_heads": 8,
        "data.name": "mock",
        "trainer.seq_length": 128,
        "trainer.global_batch_size": 1,
        "trainer.eval_every": 0,
        "checkpoint.asynchronous": asynchronous,
    }
    settings = read_assignments([f"{name}={value}" for name, value in fields.items()])
    return prepare(resolve(Registry(), default_settings(), settings), directory=folder)


def step(run: Run, parts: object) -> float:
    began = time.perf_counter()
    parts.stepper.forward_backward(parts.train_loader.take(run.config.trainer.global_batch_size), 1)
    parts.stepper.update(1e-4, 0.1)
    return time.perf_counter() - began


def seconds(value: float) -> str:
    return f"{value:.3f} s"


if __name__ == "__main__":
    main()
