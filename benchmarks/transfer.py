"""The best learning rate of decoders of several widths, with and without the base model of the smallest (μP).

    python benchmarks/transfer.py [--widths 128 256 512] [--seeds 1 2] [--steps 300] [--at-once 1] [--out FILE]

Trains decoders of two blocks and the 257 tokens of bytes at every width, rate of a grid of powers of two, and seed. A
step has 8 samples of 128 tokens of the text of Python's standard library. `mplug train` in fp32, AdamW, 20 steps of
warm-up, cosine. 'mup' has `model.mup_base.hidden_size` of the smallest width; 'standard' has the same model at that
width, and wider ones with initial values that fall with the root of the width.

The file has the mean training loss of the last tenth of the steps of each run; null if it diverged. `python
docs/pictures.py` draws it for docs/training.md. The table shows the best rate of each width, by the mean over seeds.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_suffix(".json")
INIT_STD = 0.08
SHARED = {
    "model.name": "gpt",
    "model.vocab_size": 257,
    "model.num_layers": 2,
    "model.num_attention_heads": 4,
    "trainer.seq_length": 128,
    "trainer.micro_batch_size": 8,
    "trainer.global_batch_size": 8,
    "trainer.eval_every": 0,
    "trainer.log_every": 1000,
    "trainer.device": "cpu",
    "schedule.name": "cosine",
    "schedule.warmup_steps": 20,
    "optimizer.name": "adamw",
}
PARAMETRIZATIONS = ("standard", "mup")


def fields_of(kind: str, width: int, base: int) -> dict[str, Any]:
    """The settings of a model of a width beside the base width."""
    if kind == "mup":
        return {"model.hidden_size": width, "model.mup_base.hidden_size": base, "model.init_std": INIT_STD}
    return {"model.hidden_size": width, "model.init_std": INIT_STD * math.sqrt(base / width)}


def train(kind: str, width: int, exponent: int, seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """One run with the rate 2^exponent -> its last losses."""
    fields = {**SHARED, **fields_of(kind, width, min(chosen.widths)), "optimizer.lr": 2.0**exponent}
    fields |= {"trainer.seed": seed, "trainer.steps": chosen.steps}
    command = [sys.executable, "-m", "mplug", "train", "--name", "run"]
    command += [word for field, value in fields.items() for word in ("--set", f"{field}={value}")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(chosen.threads)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        lines = Path(folder, "runs", "run", "metrics.jsonl").read_text().splitlines()
    losses = [one["loss"] for one in map(json.loads, lines) if "loss" in one]
    last = losses[-max(1, chosen.steps // 10) :]
    if done.returncode and (len(losses) == chosen.steps or "finite" not in done.stderr):
        raise RuntimeError(done.stderr)
    loss = round(sum(last) / len(last), 4) if done.returncode == 0 else None
    found = {"kind": kind, "width": width, "exponent": exponent, "seed": seed, "loss": loss}
    print(json.dumps(found), flush=True)
    return found


def mean_losses(runs: Iterable[Mapping[str, Any]], kind: str, width: int) -> dict[int, float]:
    """The loss of each rate, as the mean over seeds; without rates at which a run diverged."""
    of_rate: dict[int, list[float | None]] = {}
    for run in runs:
        if (run["kind"], run["width"]) == (kind, width):
            of_rate.setdefault(run["exponent"], []).append(run["loss"])
    kept = {rate: [loss for loss in losses if loss is not None] for rate, losses in sorted(of_rate.items())}
    return {rate: sum(losses) / len(losses) for rate, losses in kept.items() if len(losses) == len(of_rate[rate])}


def main() -> None:
    """Train all runs, write the file, and print the best rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--exponents", type=int, nargs="+", default=[*range(-11, -4)], help="rates as powers of two")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", default=PARAMETRIZATIONS, choices=PARAMETRIZATIONS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--at-once", type=int, default=1, help="runs that are trained at the same time")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    widest_first = sorted(chosen.widths, reverse=True)
    tasks = list(product(widest_first, chosen.kinds, chosen.exponents, chosen.seeds))
    with ThreadPoolExecutor(chosen.at_once) as pool:
        runs = list(pool.map(lambda one: train(one[1], one[0], one[2], one[3], chosen), tasks))
    runs.sort(key=lambda run: (run["kind"], run["width"], run["exponent"], run["seed"]))
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    chosen.out.write_text(f'{{"steps": {chosen.steps}, "runs": [\n{lines}\n]}}\n')
    for kind, width in product(chosen.kinds, sorted(chosen.widths)):
        losses = mean_losses(runs, kind, width)
        best = min(losses, key=losses.__getitem__)
        row = "  ".join(f"2^{rate}: {loss:.4f}" for rate, loss in losses.items())
        print(f"{kind:>8} {width:>5}  best 2^{best} ({losses[best]:.4f})   {row}")


if __name__ == "__main__":
    main()
