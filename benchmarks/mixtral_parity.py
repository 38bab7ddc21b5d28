"""The default model of `--model mixtral` in fp32 and fp64: how far layouts differ from one process, and why.

In fp32 the router chooses another expert where two choices are within a rounding error of each other, so that a correct
layout may differ from one process by any amount. In fp64 such ties are rarer by nine orders of magnitude. The script
trains the model in both precisions under each layout, and prints the largest relative difference of losses and gradient
norms from one process. It then prints which gradients make the norm of the first step.

python benchmarks/mixtral_parity.py --layout ep2 --layout tp2 --steps 20
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.training.assembly import build

Curves = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", action="append", default=[], help="layouts to compare; default: ep2 and tp2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], help="settings of every run, as for mplug train")
    options = parser.parse_args()
    settings = ["schedule.warmup_steps=50", "trainer.eval_every=0", "trainer.compile=never", *options.set]
    differences = ("loss off", "norm off at step 1", "norm off")
    table = Table("layout", "precision", "loss of step 1", "norm of step 1", *differences)
    for precision in ("fp32", "fp64"):
        alone = curves("", precision, options.steps, settings)
        for layout in ("", *(options.layout or ["ep2", "tp2"])):
            found = alone if not layout else curves(layout, precision, options.steps, settings)
            losses, norms = (off(found[name], alone[name]) for name in ("loss", "grad_norm"))
            first = f"{found['loss'][0]:.9g}", f"{found['grad_norm'][0]:.9g}"
            figures = (f"{value:.1e}" for value in (max(losses), norms[0], max(norms)))
            print(f"{layout or 'one process'} in {precision}: {max(losses):.1e} {max(norms):.1e}", flush=True)
            table.add_row(layout or "one process", precision, *first, *figures)
    console = Console(width=140)
    console.print(table)
    console.print(gradients(settings))


def curves(layout: str, precision: str, steps: int, settings: list[str]) -> Curves:
    """Losses and gradient norms of a run."""
    parallel = ("--parallel", layout) if layout else ()
    words = ["--model", "mixtral", "--precision", precision, "--name", "run", *parallel]
    chosen = [word for one in (*settings, f"trainer.steps={steps}") for word in ("--set", one)]
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mplug", "train", *words, *chosen, "--set", "checkpoint.every=0"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {name: [record[name] for record in records] for name in ("loss", "grad_norm")}


def off(found: list[float], expected: list[float]) -> list[float]:
    """The relative difference of every step."""
    return [abs(value - reference) / abs(reference) for value, reference in zip(found, expected, strict=True)]


def gradients(settings: list[str]) -> Table:
    """The parameters with the largest gradients in the first step, in fp64, with their share of the squared norm."""
    own = read_assignments([*settings, "model.name=mixtral", "trainer.precision=fp64"])
    run = prepare(resolve(Registry(), default_settings(), own))
    parts = build(run)
    run.step = 1
    parts.stepper.forward_backward(parts.train_loader.take(run.config.trainer.global_batch_size), 1)
    squares = {piece.name: float(piece.gradient.double().square().sum()) for piece in parts.pieces}
    total = sum(squares.values())
    table = Table("parameter", "gradient norm", "share of the squared norm")
    targets = run.config.trainer.global_batch_size * run.config.trainer.seq_length
    for name, square in sorted(squares.items(), key=lambda item: -item[1])[:8]:
        table.add_row(name, f"{square**0.5 / targets:.4g}", f"{square / total:.2%}")
    return table


if __name__ == "__main__":
    main()
