"""How much of the communication of data-parallel strategies is hidden behind computation.

    python benchmarks/overlap.py [--ranks 2] [--only zero1 zero2] [--set model.preset=1.7b] [--out overlap.json]

Trains every strategy for `--warmup` + `--steps` steps as `mplug bench` does, then profiles three steps of rank 0. STEP
is the median step. COLLECTIVES is the time per step in which any collective kernel runs, waiting for other ranks
included. EXPOSED is the part of it in which no other kernel runs, and HIDDEN is the rest as a share. 'zero2, waiting'
is ZeRO-2 with `parallel.zero.overlap=false`, for comparison.

On a CPU the model is small, HIDDEN is unknown, and the times only show that the script runs.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from mplug_bench.measure import Measured, Task, turn
from mplug_bench.profiling import COLLECTIVES

from mplug.cli.tables import table
from mplug.config.sources import Settings, merge, read_assignments
from mplug.errors import UsageError

STRATEGIES: dict[str, tuple[str, ...]] = {
    "dp": ("layout=dp{ranks}",),
    "zero1": ("layout=zero{ranks}", "zero.stage=1"),
    "zero2": ("layout=zero{ranks}", "zero.stage=2"),
    "zero2, waiting": ("layout=zero{ranks}", "zero.stage=2", "zero.overlap=false"),
    "fsdp": ("layout=fsdp{ranks}",),
}
HEADER = ("STRATEGY", "STEP MS", "COLLECTIVES MS", "EXPOSED MS", "HIDDEN")
GPU = {"model.hidden_size": 2048, "model.num_attention_heads": 16, "trainer.seq_length": 1024}
CPU = {"model.hidden_size": 64, "model.num_attention_heads": 4, "trainer.seq_length": 32}


def settings_of(strategy: str, options: argparse.Namespace) -> Settings:
    """The settings of a strategy's run: eight blocks, one micro batch of four samples per rank and step."""
    on_gpu = torch.cuda.is_available()
    size = {
        **(GPU if on_gpu else CPU),
        "model.preset": "null",
        "model.num_layers": 8,
        "trainer.micro_batch_size": 4,
        "trainer.global_batch_size": 4 * options.ranks,
        "trainer.device": "cuda" if on_gpu else "cpu",
        "trainer.precision": "bf16" if on_gpu else "fp32",
        "trainer.compile": "auto" if on_gpu else "never",
    }
    base = merge(read_assignments(f"{name}={value}" for name, value in size.items()), read_assignments(options.set))
    layout = (f"parallel.{choice.format(ranks=options.ranks)}" for choice in STRATEGIES[strategy])
    return merge(base, read_assignments(layout))


def figures(found: Measured) -> dict[str, float | None]:
    """Seconds of the median step, of collectives and of exposed collectives; the hidden share, None on a CPU."""
    assert found.profile is not None
    exposed, whole = found.profile.classes.get(COLLECTIVES, 0.0), found.profile.collectives
    return {
        "step": found.step,
        "collectives": whole,
        "exposed": exposed,
        "hidden": 1 - exposed / whole if whole and found.device == "cuda" else None,
    }


def row(strategy: str, found: dict[str, float | None]) -> tuple[str, ...]:
    """A line of the table."""
    times = (f"{(found[name] or 0.0) * 1e3:.2f}" for name in ("step", "collectives", "exposed"))
    return strategy, *times, "-" if found["hidden"] is None else f"{found['hidden']:.1%}"


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, or processes on a CPU")
    parser.add_argument("--only", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="may be repeated")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    return parser.parse_args()


def main() -> int:
    """Measure, and print a row per strategy."""
    options, found = parsed(), dict[str, dict[str, float | None]]()
    for strategy in options.only:
        task = Task(settings_of(strategy, options), options.warmup, options.steps, profile=True)
        try:
            found[strategy] = figures(turn(task))
        except UsageError as error:
            print(f"'{strategy}' is skipped: {error}", file=sys.stderr)
    print(table(HEADER, (row(strategy, one) for strategy, one in found.items())))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if len(found) == len(options.only) else 1


if __name__ == "__main__":
    sys.exit(main())
