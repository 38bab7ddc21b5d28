"""What recomputation and offload save and cost: bytes of activations and the time of a step, choice beside choice.

    python benchmarks/recompute.py --preset 1.7b --precision bf16 --set trainer.seq_length=4096
    python benchmarks/recompute.py --set trainer.seq_length=256 --set trainer.global_batch_size=2

Each choice has a process of its own, and trains on random tokens: `--warmup` steps, then `--steps`, of which the median
counts. Without `--only`, all choices are measured. Two figures of memory: `kept` are the bytes that autograd keeps of
one micro batch's forward pass, where units are eager or compiled; `peak`, on a GPU, is by how much a step's most
allocated memory exceeds what is allocated between steps: activations, gradients in flight and temporaries. `time` is
relative to the choice 'nothing'; 'full' costs one more forward pass, a third of a step at most.

Exit status 1 if a choice's loss of the last step is not that of 'nothing' to the bit (to 1e-3 where kernels of a GPU
need not give the same bits twice).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from mplug.cli.tables import human_bytes, table
from mplug.config.defaults import default_settings
from mplug.config.sources import Settings, merge, read_assignments
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug_testing.memory import kept_bytes

CHOICES: dict[str, list[str]] = {
    "nothing": [],
    "selective": ["mode=selective"],
    "selective, wide": ["mode=selective", "slots=[attention, activation, norm]"],
    "full, every 4th": ["mode=full", "every=4"],
    "full, every 2nd": ["mode=full", "every=2"],
    "full": ["mode=full"],
    "offload": ["mode=none", "offload=true"],
    "full, offload": ["mode=full", "offload=true"],
}


def settings_of(choice: str, options: argparse.Namespace) -> Settings:
    """The run's settings with a choice's."""
    assignments = [f"memory.recompute.{assignment}" for assignment in CHOICES[choice]]
    given = [f"{section}={value}" for section, value in (("model.preset", options.preset),) if value]
    given += [f"trainer.precision={options.precision}", "data.name=mock", "trainer.eval_every=0"]
    return merge(read_assignments([*given, *options.assignments]), read_assignments(assignments))


def measure(choice: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a choice, in this process."""
    import torch

    from mplug.model.build import choose_device
    from mplug.training.assembly import build
    from mplug.training.loop import launch_step

    config = resolve(Registry(), default_settings(), settings_of(choice, options))
    run = prepare(config)
    run.device = choose_device(config)
    parts = build(run)
    on_gpu, seconds, loss, samples = run.device == "cuda", list[float](), 0.0, config.trainer.global_batch_size
    kept, before = kept_bytes(run, parts), 0
    for run.step in range(1, options.warmup + options.steps + 1):
        if on_gpu and run.step == options.warmup + 1:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        result, _ = launch_step(run, parts, samples, config.optimizer.lr, 0.1)
        loss = float(result.loss)  # waits for the step
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    return {"kept": kept, "peak": peak, "seconds": statistics.median(seconds[options.warmup :]), "loss": loss}


def apart(choice: str) -> dict[str, Any]:
    """The figures of a choice, in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--here", choice]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if finished.returncode != 0:
        raise SystemExit(f"'{choice}' fails: its process ended with status {finished.returncode}")
    figures: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", help="a named size of the default model")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--set", dest="assignments", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--only", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print("\n" + json.dumps(measure(options.here, options)))
        return
    found = {choice: apart(choice) for choice in dict.fromkeys(["nothing", *options.only])}
    plain, rows, wrong = found["nothing"], [], []
    for choice, own in found.items():
        allowed = 0.0 if own["peak"] is None else 1e-3 * abs(plain["loss"])
        if not abs(own["loss"] - plain["loss"]) <= allowed:
            wrong.append(f"'{choice}' ends with a loss of {own['loss']}, and 'nothing' with {plain['loss']}")
        peak = "-" if own["peak"] is None else human_bytes(own["peak"])
        ratio = own["seconds"] / plain["seconds"]
        rows.append((choice, human_bytes(own["kept"]), peak, f"{own['seconds'] * 1e3:.1f}", f"{ratio:.2f}"))
    print(table(("CHOICE", "KEPT", "PEAK", "STEP, MS", "TIME"), rows))
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
