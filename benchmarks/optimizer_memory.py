"""The memory that `mplug explain` states for weights, gradients, masters and optimizer states, beside what a run holds.

    python benchmarks/optimizer_memory.py [--cases adamw adamw-8bit muon adafactor] [--layout zero2] [--set FIELD=VALUE]

Trains two steps of each case, and reads the device's allocator between steps, when activations are freed: HELD is what
it has allocated since the process began, without the entries of the micro batches. On a CPU, HELD is the sum of the
storages of all tensors. RATIO is HELD over STATED; the goal is within 2%.
"""

import argparse
import gc
import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from mplug_bench.measure import Task, _prepared, _running

from mplug.cli.tables import table
from mplug.commands import Send, build, build_model, launch, supervisor_of
from mplug.config.sources import Settings, merge, read_assignments
from mplug_estimates import measure_bytes

GPU = {"model.preset": "1.7b", "trainer.seq_length": 2048, "trainer.precision": "bf16", "trainer.device": "cuda"}
CPU = {"model.hidden_size": 256, "model.num_attention_heads": 4, "trainer.seq_length": 32, "trainer.device": "cpu"}
SIZE = {"trainer.micro_batch_size": 1, "trainer.global_batch_size": 4}
CASES = {
    "adamw": ["optimizer.name=adamw"],
    "adamw-bf16": ["optimizer.name=adamw", "optimizer.moments=bf16"],
    "adamw-8bit": ["optimizer.name=adamw", "optimizer.moments=8bit"],
    "muon": ["optimizer.name=muon"],
    "adafactor": ["optimizer.name=adafactor"],
    "lion": ["optimizer.name=lion"],
    "soap": ["optimizer.name=soap"],
    "schedulefree": ["optimizer.name=schedulefree", "schedule.name=constant"],
}
HEADER = ("CASE", "PARAMETERS", "STATED BYTES", "PER PARAMETER", "HELD BYTES", "PER PARAMETER", "RATIO")


@dataclass(frozen=True)
class Held:
    """Parameters of this rank, and bytes that it holds between steps."""

    parameters: int
    num_bytes: int


def settings_of(case: str, options: argparse.Namespace) -> Settings:
    """The settings of a run."""
    size = {**(GPU if torch.cuda.is_available() else CPU), **SIZE, "parallel.layout": options.layout}
    words = [f"{name}={value}" for name, value in size.items() if value != ""]
    return merge(merge(read_assignments(words), read_assignments(CASES[case])), read_assignments(options.set))


def held(task: Task, send: Send) -> Held:
    """Be one rank: train, and count what is held between steps."""
    with _running(task, send) as run:
        before = held_bytes(run.device)
        parts, trainer, optimizer = build(run), run.config.trainer, run.config.optimizer
        for number in range(1, task.steps + 1):
            run.step = number
            send(number)
            parts.stepper.forward_backward(parts.train_loader.take(trainer.global_batch_size), number)
            parts.stepper.update(optimizer.lr, optimizer.weight_decay)
            parts.model.weights_settled()
        parameters = sum(prod(one.shape) for one in parts.model.parameters().values())
        return Held(parameters, held_bytes(run.device) - before)


def held_bytes(device: str) -> int:
    """Bytes of tensors of this process on the device."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(device)
    storages = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu":
            storage = one.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def main() -> None:
    """Measure, and print a line per case as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["adamw", "adamw-8bit", "muon", "adafactor"], choices=CASES)
    parser.add_argument("--layout", default="")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="may be repeated")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    options, rows, figures = parser.parse_args(), [], []
    for case in options.cases:
        task = Task(settings_of(case, options), 0, 2)
        run = _prepared(task)
        kinds = measure_bytes(run, build_model(run))
        stated = sum(kinds.values())
        one: Held = launch(run.mesh.world_size, held, task, supervisor=supervisor_of(run))
        each = (f"{stated / one.parameters:.3f}", f"{one.num_bytes:,}", f"{one.num_bytes / one.parameters:.3f}")
        rows.append((case, f"{one.parameters:,}", f"{stated:,}", *each, f"{one.num_bytes / stated:.4f}"))
        figures.append({"case": case, "layout": options.layout, "stated": kinds, **vars(one)})
        print(json.dumps({**figures[-1], "ratio": one.num_bytes / stated}), flush=True)
    print(table(HEADER, rows))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
