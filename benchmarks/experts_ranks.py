"""Decoders with experts over ranks: their speed, and where the time of a step goes on every rank.

    python benchmarks/experts_ranks.py --variant kernels.experts=quack \
        --variant 'kernels.experts=quack parallel.ep.dispatch=symmetric'

Mixtral's `8b` under `ep2`, a micro batch of 2 samples of 4,096 tokens per rank and step, in bf16, with the kernels of
kernels/triton and flash-attn-4. Each variant runs in its own processes. Its first line has the median step, tokens per
second and GPU, MFU (A = 6), the peak memory, how often the CPU waits for the GPU in a step, how many steps were
repeated, and of the last step LOAD, the rows of the busiest rank over the mean on average over the blocks, and the
loss: variants train on the same tokens, so their losses differ by rounding only.

A table of every rank follows. For each kind of kernel and stream, it has the milliseconds of a step in which such a
kernel runs, and EXPOSED, those in which no kernel of another kind or stream runs. A kernel of the exchange also waits
for the other ranks: on the rank with fewer rows its time includes the time by which the other rank computes longer.
"""

import argparse
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from mplug_bench.measure import Facts, Task, _prepared, _running, facts_of
from mplug_bench.profiling import HEAD_START, RECORDED, SPIN, class_of, waits_of

from mplug import Run, StepResult
from mplug.commands import Send, build, launch, launch_step, peak_memory_gib, peak_tflops, supervisor_of, table
from mplug.config.sources import Settings, merge, read_assignments
from mplug.errors import RunError, UsageError
from mplug_estimates import timed

KINDS = {
    "exchange of rows": r"sendrecv|all_?to_?all|push_rows|symmetric_memory",
    "other collectives": r"nccl|c10d|gloo",
    "grouped products": r"groupproblemshape|grouped|varlen",
    "router, order of rows": r"topk|bitonic|radix|sort|searchsorted|rank_rows|place_rows|scan|cumsum|sinkhorn",
    "movement of rows": r"spread_rows|gather_rows|index_?select|indexselect|index_elementwise",
}
"""Kinds of kernels by their names, in the order in which they are tried; all others have the class of `mplug bench`."""
GPU = {
    "model.name": "mixtral",
    "model.preset": "8b",
    "trainer.device": "cuda",
    "trainer.precision": "bf16",
    "trainer.micro_batch_size": 2,
    "trainer.global_batch_size": 4,
    "kernels.default": "triton",
    "kernels.attention": "flash",
}
CPU = {
    "model.name": "mixtral",
    "model.preset": "tiny",
    "model.num_layers": 2,
    "trainer.device": "cpu",
    "trainer.seq_length": 32,
    "trainer.micro_batch_size": 2,
    "trainer.global_batch_size": 4,
    "trainer.compile": "never",
}
GAPS = "gaps"


@dataclass(frozen=True)
class Busy:
    """A kind of kernel on a stream: seconds of a step in which it runs, those in which nothing else does, and calls."""

    kind: str
    stream: int
    seconds: float
    exposed: float
    calls: float


@dataclass(frozen=True)
class Found:
    """The figures of a variant; `ranks` has the kinds of kernels of each rank."""

    facts: Facts
    seconds: list[float]
    memory_gib: float
    peak_tflops: float | None
    waits: dict[str, int] | None
    repeated: int
    load: float
    loss: float
    ranks: list[list[Busy]]

    def line(self) -> str:
        """The first line of the variant."""
        step = statistics.median(self.seconds)
        rate = self.facts.tokens / step / self.facts.world_size
        tflops = self.facts.flops / step / 1e12 / self.facts.world_size
        mfu = f"{tflops / self.peak_tflops:.1%}" if self.peak_tflops else "-"
        waits = "-" if self.waits is None else sum(self.waits.values())
        exposed = "/".join(
            f"{1e3 * sum(busy.exposed for busy in one if busy.kind.startswith('exchange')):.1f}" for one in self.ranks
        )
        return (
            f"{1e3 * step:.1f} ms ({1e3 * min(self.seconds):.1f} to {1e3 * max(self.seconds):.1f}), {rate:,.0f} "
            f"tokens/s/GPU, MFU {mfu}, {self.memory_gib:.1f} GiB, exchange exposed {exposed} ms, waits of the CPU "
            f"{waits}, repeated steps {self.repeated}, load {self.load:.3f}, loss {self.loss:.5f}"
        )


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    lowered = name.lower()
    return next((kind for kind, words in KINDS.items() if re.search(words, lowered)), None) or class_of(name)


def busy(events: Iterable[tuple[str, int, float, float]], steps: int) -> list[Busy]:
    """(kind, stream, start, end) of kernels in any order -> each kind and stream per step, and the gaps."""
    events = list(events)
    borders = sorted(
        border
        for kind, stream, start, end in events
        for border in ((start, 1, (kind, stream)), (end, -1, (kind, stream)))
    )
    seconds, exposed = defaultdict[tuple[str, int], float](float), defaultdict[tuple[str, int], float](float)
    running: Counter[tuple[str, int]] = Counter()
    before = borders[0][0] if borders else 0.0
    for time, change, key in borders:
        now = [other for other, number in running.items() if number] or [(GAPS, -1)]
        for other in now:
            seconds[other] += time - before
        if len(now) == 1:
            exposed[now[0]] += time - before
        running[key] += change
        before = time
    calls = Counter((kind, stream) for kind, stream, _, _ in events)
    found = [Busy(*key, seconds[key] / steps, exposed[key] / steps, calls[key] / steps) for key in seconds]
    return sorted(found, key=lambda one: -one.seconds)


def profiled(step: Callable[[], None]) -> list[Busy]:
    """The kinds of kernels of RECORDED calls of `step`, on a GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorder:
        torch.cuda._sleep(HEAD_START)
        for _ in range(RECORDED):
            step()
        torch.cuda.synchronize()
    events = [one for one in recorder.events() or () if one.device_type.name == "CUDA" and not one.is_user_annotation]
    began = max((one.time_range.end for one in events if SPIN in one.name), default=0.0)
    kept = [one for one in events if one.time_range.start >= began and not one.name.endswith(" Sync")]
    return busy(
        (
            (kind_of(one.name), one.device_resource_id, one.time_range.start / 1e6, one.time_range.end / 1e6)
            for one in kept
        ),
        RECORDED,
    )


def measured(task: Task, send: Send) -> Found:
    """Be one rank: the figures, the same on every rank."""
    with _running(task, send) as run:
        parts, trainer, optimizer = build(run), run.config.trainer, run.config.optimizer
        results = []

        def step() -> None:
            run.step += 1
            send(run.step)
            results.append(launch_step(run, parts, trainer.global_batch_size, optimizer.lr, optimizer.weight_decay)[0])
            del results[:-1]

        for _ in range(task.warmup):
            step()
        seconds = timed(step, task.steps, run.device)
        memory = max(run.gathered(peak_memory_gib(run.device)))
        if run.rank == 0:
            print(f"measured {1e3 * statistics.median(seconds):.1f} ms per step; the profile follows", flush=True)
        profiling = task.profile and run.device.startswith("cuda")
        ranks = run.gathered(profiled(step) if profiling else [])
        waits = waits_of(step, run.device) if task.profile else None
        repeated = int(results[-1].figures.get("repeated_steps", 0))
        facts, load, loss = facts_of(run, parts.model), load_of(run, results[-1]), float(results[-1].loss)
        return Found(facts, seconds, memory, peak_tflops(run.device), waits, repeated, load, loss, ranks)


def load_of(run: Run, result: StepResult) -> float:
    """The choices of the busiest rank's experts over the mean of the ranks, on average over the blocks."""
    size = run.mesh.axes["ep"].size
    loads = [one.unflatten(0, (size, -1)).sum(dim=1) for name, one in result.statistics.items() if "load" in name]
    return statistics.mean(float(one.max() / one.mean()) for one in loads)


def settings_of(variant: str, options: argparse.Namespace) -> Settings:
    """The settings of a variant."""
    size = GPU if torch.cuda.is_available() and not options.tiny else CPU
    fixed = [f"{name}={value}" for name, value in {**size, "parallel.layout": "ep2"}.items()]
    return merge(read_assignments([*fixed, *options.set]), read_assignments(variant.split()))


def report(name: str, found: Found) -> None:
    """Print a variant."""
    print(f"{name or 'unchanged'}: {found.line()}", flush=True)
    if found.waits:
        print("  waits: " + ", ".join(f"{place} ({number})" for place, number in found.waits.items()))
    for rank, kinds in enumerate(found.ranks):
        if kinds:
            rows = (
                (one.kind, one.stream, f"{1e3 * one.seconds:.2f}", f"{1e3 * one.exposed:.2f}", f"{one.calls:.0f}")
                for one in kinds
                if one.seconds > 1e-4
            )
            print(table((f"RANK {rank}", "STREAM", "MS", "EXPOSED", "CALLS"), rows), flush=True)


def main() -> int:
    """Measure and print, a variant at a time; one that fails is left out, with the reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", default=[], metavar="'FIELD=VALUE ...'", help="may be repeated")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="may be repeated")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-profile", action="store_true", help="tokens/s alone")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    options, figures = parser.parse_args(), dict[str, Any]()
    failed = 0
    for variant in options.variant or [""]:
        task = Task(settings_of(variant, options), options.warmup, options.steps, not options.no_profile)
        try:
            run = _prepared(task)
            found: Found = launch(run.mesh.world_size, measured, task, supervisor=supervisor_of(run))
        except (UsageError, RunError) as error:
            failed += 1
            print(f"{variant or 'unchanged'}: none: {error}", flush=True)
            continue
        report(variant, found)
        figures[variant] = asdict(found)
        if options.out is not None:
            options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
