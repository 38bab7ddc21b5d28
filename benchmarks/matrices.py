"""What an update with whole matrices costs beside AdamW's, under layouts that cut the matrices.

    python benchmarks/matrices.py [--layouts '' tp2 fsdp2 zero2] [--optimizers adamw muon] [--tokens 524288]
    python benchmarks/matrices.py --optimizers adamw adamw+offload      (the states in the memory of the CPU)
    python benchmarks/matrices.py --optimizers muon muon+clip muon+clip+kernel    (QK-clip, also with a Triton kernel)

Trains a few small steps for each pair, and measures a micro batch and an update by themselves, on rank 0. STEP is the
time that follows for a step of `--tokens` tokens: its micro batches, and one update. RATIO is the step's time over that
of the first optimizer under the same layout. An optimizer alone does not change a micro batch, so all of them count the
micro batch of the first one: small differences between runs would hide the update. A variant ('+clip') counts its own.
Communication that a step hides behind its first or last micro batch is in the time of a micro batch here. On a CPU the
model is small, and the times only show that the script runs.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from mplug_bench.measure import Task, _prepared, _running

from mplug.cli.tables import table
from mplug.commands import Send, build, launch, peak_memory_gib, supervisor_of
from mplug.config.sources import Settings, merge, read_assignments
from mplug.training.hardware import Moment

GPU = {"model.preset": "1.7b", "trainer.seq_length": 2048, "trainer.micro_batch_size": 4, "trainer.precision": "bf16"}
CPU = {"model.hidden_size": 64, "model.num_attention_heads": 4, "trainer.seq_length": 32, "trainer.micro_batch_size": 2}
CPU |= {"model.qk_norm": False}
VARIANTS = {
    "offload": {"optimizer.offload": "{}"},
    "clip": {"optimizer.qk_clip": "100"},
    "kernel": {"kernels.largest_logits": "triton"},
}
"""Settings by the words that may follow the name of an optimizer: 'adamw+offload'."""
HEADER = ("LAYOUT", "OPTIMIZER", "MICRO BATCH MS", "UPDATE MS", "STEP MS", "RATIO", "GIB")


@dataclass(frozen=True)
class Found:
    """Median seconds of a micro batch and of an update, the tokens of a micro batch over all ranks, and the memory."""

    micro_batch: float
    update: float
    tokens: int
    memory_gib: float

    def step(self, tokens: int, micro_batch: float) -> float:
        """The seconds of a step, given those of a micro batch."""
        return tokens / self.tokens * micro_batch + self.update


def settings_of(layout: str, optimizer: str, options: argparse.Namespace) -> Settings:
    """The settings of a run."""
    on_gpu = torch.cuda.is_available()
    name, *variants = optimizer.split("+")
    size = {**(GPU if on_gpu else CPU), "optimizer.name": name, "trainer.device": "cuda" if on_gpu else "cpu"}
    size |= {field: value for variant in variants for field, value in VARIANTS[variant].items()}
    words = [f"{name}={value}" for name, value in size.items()] + ([f"parallel.layout={layout}"] if layout else [])
    found = merge(read_assignments(words), read_assignments(options.set))
    run = _prepared(Task(merge(found, read_assignments(["trainer.global_batch_size=64"])), 0, 0))
    _, shards = run.mesh.batch_shard(0)
    samples = options.micro_batches * run.micro_batch_size * shards
    return merge(found, read_assignments([f"trainer.global_batch_size={samples}"]))


def measured(task: Task, send: Send) -> Found:
    """Be one rank: train, and time micro batches and updates apart from each other."""
    with _running(task, send) as run:
        parts, trainer, optimizer = build(run), run.config.trainer, run.config.optimizer
        (count,) = run.micro_batch_counts()
        micro_batches, updates = [], []
        for number in range(1, task.warmup + task.steps + 1):
            run.step = number
            send(number)
            begin = Moment(run.device)
            parts.stepper.forward_backward(parts.train_loader.take(trainer.global_batch_size), number)
            middle = Moment(run.device)
            parts.stepper.update(optimizer.lr, optimizer.weight_decay)
            parts.model.weights_settled()
            end = Moment(run.device)
            end.wait()
            micro_batches.append(middle.since(begin) / count)
            updates.append(end.since(middle))
        tokens = trainer.global_batch_size * trainer.seq_length // count
        memory = max(run.gathered(peak_memory_gib(run.device)))
        kept = slice(task.warmup, None)
        return Found(statistics.median(micro_batches[kept]), statistics.median(updates[kept]), tokens, memory)


def main() -> None:
    """Measure, and print a row per layout and optimizer as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=[""])
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--tokens", type=int, default=1 << 19)
    parser.add_argument("--micro-batches", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="may be repeated")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    options, rows, figures = parser.parse_args(), [], []
    for layout in options.layouts:
        first: Found | None = None
        for optimizer in options.optimizers:
            task = Task(settings_of(layout, optimizer, options), options.warmup, options.steps)
            run = _prepared(task)
            one: Found = launch(run.mesh.world_size, measured, task, supervisor=supervisor_of(run))
            first = first or one
            own = one.micro_batch if "+" in optimizer else first.micro_batch
            step, reference = one.step(options.tokens, own), first.step(options.tokens, first.micro_batch)
            times = (f"{1e3 * seconds:.2f}" for seconds in (one.micro_batch, one.update, step))
            rows.append(
                (layout or "one process", optimizer, *times, f"{step / reference:.4f}", f"{one.memory_gib:.2f}")
            )
            rates = {"ratio": step / reference, "tokens_per_s": options.tokens / step}
            figures.append({"layout": layout, "optimizer": optimizer, **rates, **vars(one)})
            print(json.dumps(figures[-1]), flush=True)
    print(table(HEADER, rows))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
