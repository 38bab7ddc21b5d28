"""Memory and predicted times of pipeline schedules on one GPU, one rank of the pipeline after the other.

    python benchmarks/pipeline_memory.py --stages 2 4 --preset 7.1b

Each rank runs its row of the schedule's table with its real chunks, in this process. The tensors that it would receive
from other ranks are random, and those that it sends are dropped. A rank allocates what its own row says, so its memory
is that of the real run. Losses mean nothing here.

First table: peak memory of activations in a step, in GiB, beyond weights, gradients and optimizer states.

    MICRO BATCHES  the peak by the table: micro batches whose activations the rank holds
    ESTIMATE       the peak of the table in micro batches, times the activations of one micro batch in the rank
    PREDICTED      the table's actions, replayed with the bytes of one micro batch in each chunk (mplug_schedules):
                   what each pass leaves, and what it holds while it runs
    MEASURED       the peak of a step
    RATIO          measured / predicted

Second table: milliseconds of the passes of one micro batch in each chunk: forward (F), whole backward (B), and the
halves of backward for activations (I) and for weights (W). `KEPT` is what they leave, in GiB.

Third table: predicted step times. These are not measured: they follow from the second table and the schedule's table,
with transfers of --transfer milliseconds. TOKENS/S/GPU counts passes only, without the update of weights.

'zb-limited' has a limit of 2p - 1 micro batches (ZB-H2). On a CPU, memory is that of the
tensors that operations return, and counting it makes times longer.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from mplug_pp import wire
from mplug_pp.chunk import Chunk
from mplug_pp.wire import Arrival, Layout
from torch.testing._internal.distributed.fake_pg import FakeStore

from mplug import MicroBatch, Run
from mplug.commands import Registry, Settings, build, choose_device, prepare, read_assignments, resolve, table
from mplug.distributed.groups import Groups
from mplug.training.feed import RankBatches
from mplug_schedules import Costs, Footprint, Kind, Shape, Table, peak, peak_bytes, proven_table, shape_of, timeline
from mplug_testing.live_bytes import LiveBytes

BUILDS = {
    ("zb-h1", 1): ("1f1b", "zb-h1", "zb-limited"),
    ("zb-v", 2): ("zb-v", "dualpipe-v"),
    ("zb-h1", 2): ("interleaved",),
}
"""Schedules that give the same chunks to a rank, by the one that the model is built for: it has all their passes."""
Row = tuple[Any, ...]
Built = tuple[str, int]
"""A schedule, and its number of chunks per rank."""
HALVES = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
GIB = 2**30


class LoneWire:
    """A wire without another end: received tensors are random, sent tensors are dropped."""

    def __init__(self, peer: int, device: str, *_: object) -> None:
        self.device = torch.device(device)

    def send(self, tensors: Any) -> None:
        """Drop the tensors."""
        list(tensors)

    def receive(self, layouts: Any) -> Arrival:
        """Random tensors of these dtypes and shapes."""
        return Arrival([], random_tensors(layouts, self.device))

    def release(self) -> None:
        """Nothing is under way."""

    finish = release


class Announced(dict[Any, list[Layout]]):
    """The layouts that the other end would announce; they are those of the plan."""

    def __init__(self, layouts: list[Layout]) -> None:
        super().__init__()
        self.layouts = layouts

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> list[Layout]:
        return self.layouts


def random_tensors(layouts: Any, device: torch.device) -> list[torch.Tensor]:
    """Random tensors of these dtypes and shapes."""
    return [torch.empty(shape, dtype=dtype, device=device).normal_() for dtype, shape in layouts]


class Rank:
    """One rank of a pipeline, built in this process (`in_a_world`), and what it has measured."""

    def __init__(self, rank: int, settings: Settings, meter: "Meter") -> None:
        from mplug_bench.measure import bench_settings

        self.meter = meter
        run = prepare(resolve(Registry(), bench_settings(), settings))
        run.device = choose_device(run.config)
        run.rank, run.groups = rank, Groups(rank)
        self.run: Run = run
        self.parts = build(run)
        self.stepper: Any = self.parts.stepper
        self.model = self.parts.model
        for chunk, crossing in self.stepper.crossings.items():
            crossing.announced = Announced(self._layouts(chunk, crossing.names))
        self.own: Mapping[int, Chunk] = self.stepper.chunks

    def _layouts(self, chunk: int, names: tuple[str, ...]) -> list[Layout]:
        shapes = [shape_of(self.run, self.model, name) for name in names]
        assert None not in shapes, f"the plan does not state the shapes of {names}, which enter chunk {chunk}"
        return [(self.run.precision.activation_dtype, shape) for shape in shapes if shape is not None]

    def batches(self, number: int) -> RankBatches:
        """Micro batches from the loader."""
        feed = self.parts.train_loader
        return feed.step_of(list(islice(feed.loader.take(self.run.config.trainer.global_batch_size), number)))

    def chunk_figures(self, repeats: int) -> dict[int, tuple[Footprint, Costs]]:
        """The bytes and the milliseconds of the passes of one micro batch in each chunk of the rank."""
        self.run.step, default = 1, self.parts.stepper.default  # type: ignore[attr-defined]
        default.begin_step(1)
        default.sinks.expect_passes(dict.fromkeys(self.model.sinks, 1 << 20))
        entries = default.entries(next(self.batches(1)), 1)
        return {number: self._figures(chunk, entries, repeats) for number, chunk in self.own.items()}

    def _figures(self, chunk: Chunk, entries: MicroBatch, repeats: int) -> tuple[Footprint, Costs]:
        passes = [One(self, chunk, entries, split) for split in (True, False)]
        for one in passes:
            for _ in range(2 + repeats):
                one.run()
        halves, whole = passes
        forward, inputs, weights = (halves.median(kind, repeats) for kind in HALVES)
        footprint = Footprint(
            halves.left[Kind.FORWARD],
            halves.left[Kind.INPUT_GRADIENT],
            halves.inputs,
            halves.upstream,
            halves.beyond | {Kind.BACKWARD: whole.beyond[Kind.BACKWARD]},
        )
        return footprint, Costs(forward, inputs, weights, 0.0, whole.median(Kind.BACKWARD, repeats))

    def peak_of_step(self, table: Table) -> int:
        """Peak bytes of a step of the table, beyond those before it."""
        number = len({action.micro_batch for action in table.rows[self.stepper.rank]})
        self.stepper._table = lambda _: table
        self.run.step += 1
        self.meter.begin()
        held = self.meter.held()
        self.stepper.forward_backward(self.batches(number), self.run.step)
        return self.meter.peak() - held

    def close(self) -> None:
        """Free the memory: compiled code may keep references to modules, so each storage is emptied."""
        parts = self.parts
        states = [t for piece in parts.pieces for t in (piece.master, *parts.optimizer.state(piece).values())]
        tensors = [*self.model.module.parameters(), self.model.sinks.arena, *states]
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)
        gc.collect()
        if self.run.device.startswith("cuda"):
            torch.cuda.empty_cache()


@contextmanager
def in_a_world(rank: int, size: int) -> Iterator[None]:
    """Be one rank of a world whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class One:
    """Passes of one micro batch in one chunk: their milliseconds, and the bytes that they hold and leave."""

    def __init__(self, rank: Rank, chunk: Chunk, entries: MicroBatch, split: bool) -> None:
        self.rank, self.chunk, self.entries, self.split = rank, chunk, entries, split
        self.times: dict[Kind, list[float]] = {}
        self.left: dict[Kind, int] = {}
        self.beyond: dict[Kind, int] = {}
        self.inputs = self.upstream = 0

    def run(self) -> None:
        """Run the passes once."""
        device, held = self.rank.run.device, self.rank.meter.held
        begin = held()
        taken = random_tensors(self.rank._layouts(self.chunk.number, self.chunk.takes), torch.device(device))
        self.inputs = held() - begin
        kept: list[Any] = [self._timed(Kind.FORWARD, self._forward, taken)]
        taken.clear()
        kept.clear()
        self.left[Kind.FORWARD] = held() - begin
        before = held()
        layouts = [] if self.chunk.is_last else self.chunk.gradients_of(0)
        upstream = random_tensors(layouts, torch.device(device))
        self.upstream = held() - before
        back = Kind.INPUT_GRADIENT if self.split else Kind.BACKWARD
        kept.append(self._timed(back, self.chunk.backward, 0, upstream))
        upstream.clear()
        kept.clear()
        self.left[back] = held() - begin
        if self.split:
            self._timed(Kind.WEIGHT_GRADIENT, self.chunk.weight_gradients, 0)

    def _forward(self, taken: list[torch.Tensor]) -> object:
        return self.chunk.forward(0, self.entries, taken, self.split)

    def _timed(self, kind: Kind, work: Callable[..., object], *given: object) -> object:
        meter = self.rank.meter
        meter.begin()
        held = meter.held()
        start = time.perf_counter()
        result = work(*given)
        self.beyond[kind] = meter.peak() - held  # waits for the device
        self.times.setdefault(kind, []).append(1e3 * (time.perf_counter() - start))
        return result

    def median(self, kind: Kind, repeats: int) -> float:
        """The median milliseconds of the last repeats."""
        return statistics.median(self.times[kind][-repeats:])


class OfGpu:
    """The memory of the GPU, as its allocator counts it."""

    def held(self) -> int:
        """Allocated bytes."""
        return torch.cuda.memory_allocated()

    def begin(self) -> None:
        """Begin to measure a peak."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """The peak since `begin`, after the device has finished."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


class OfCpu:
    """The memory of tensors on a CPU, inside a `LiveBytes` context."""

    def __init__(self, live: LiveBytes) -> None:
        self.live = live

    def held(self) -> int:
        """Bytes of the tensors."""
        return self.live.held

    def begin(self) -> None:
        """Begin to measure a peak."""
        self.live.reset_peak()

    def peak(self) -> int:
        """The peak since `begin`."""
        return self.live.peak


Meter = OfGpu | OfCpu


def measure(stages: int, built_for: Built, options: argparse.Namespace, meter: Meter) -> tuple[list[Row], list[Costs]]:
    """Measure every rank for the schedules of one build, and print the tables: (rows, the costs of all chunks)."""
    schedules = [name for name in BUILDS[built_for] if name in options.schedules]
    tables = {name: table_of(name, stages, options.measured) for name in schedules}
    figures: dict[int, tuple[Footprint, Costs]] = {}
    measured: dict[tuple[str, int], int] = {}
    for rank in range(stages):
        start = time.perf_counter()
        with in_a_world(rank, stages):
            one = Rank(rank, settings_of(stages, built_for, options), meter)
            built = time.perf_counter() - start
            figures |= one.chunk_figures(options.repeats)
            measured |= {(name, rank): one.peak_of_step(tables[name]) for name in schedules}
            one.close()
        took = time.perf_counter() - start
        print(
            f"pp{stages}, {len(one.own)} chunks per rank, rank {rank}: {took:.1f} s, {built:.1f} s to build", flush=True
        )
    chunks = [figures[number] for number in sorted(figures)]
    rows = [
        row_of(name, tables[name], rank, [one for one, _ in chunks], measured[name, rank])
        for name in schedules
        for rank in range(stages)
    ]
    print(table(("SCHEDULE", "RANK", "MICRO BATCHES", "ESTIMATE", "PREDICTED", "MEASURED", "RATIO"), rows))
    header = ("CHUNK", "RANK", "F", "B", "I", "W", "KEPT AFTER F", "KEPT AFTER I")
    ranks = tables[schedules[0]].ranks
    print(table(header, [times_of(number, ranks[number], *one) for number, one in enumerate(chunks)]), flush=True)
    return rows, [costs for _, costs in chunks]


def row_of(name: str, found: Table, rank: int, footprints: list[Footprint], measured: int) -> Row:
    """The row of a rank in the first table."""
    held = peak(found, rank)
    whole = sum(footprints[chunk].kept for chunk in found.chunks_of(rank))
    predicted = peak_bytes(found, rank, footprints)
    sizes = (gib(size) for size in (held * whole, predicted, measured))
    return name, rank, f"{held:g}", *sizes, f"{measured / predicted:.3f}"


def times_of(number: int, rank: int, footprint: Footprint, costs: Costs) -> tuple[Any, ...]:
    """The row of a chunk in the second table."""
    times = (costs.forward, costs.of(Kind.BACKWARD), costs.input_gradient, costs.weight_gradient)
    return number, rank, *(f"{one:.2f}" for one in times), gib(footprint.kept), gib(footprint.postponed)


def predict(stages: int, costs: Mapping[str, list[Costs]], options: argparse.Namespace) -> None:
    """Print the predicted step times."""
    rows = []
    for number in options.micro_batches:
        for name, each in costs.items():
            each = [replace(one, transfer=options.transfer) for one in each]
            times = timeline(table_of(name, stages, number), each)
            rate = 1e3 * number * options.seq_length / times.length / stages
            rows.append((name, number, f"{times.length:.1f}", f"{times.bubble:.1%}", f"{rate:,.0f}"))
    print(f"\npredicted, {stages} stages, transfers of {options.transfer:g} ms")
    print(table(("SCHEDULE", "MICRO BATCHES", "MS PER STEP", "BUBBLE", "TOKENS/S/GPU"), rows), flush=True)


def table_of(name: str, stages: int, number: int) -> Table:
    """The table of a schedule; 'zb-limited' may hold as much as removes most of its bubble."""
    return proven_table(name, Shape(stages, number, limit=2 * stages - 1 if name == "zb-limited" else None))


def settings_of(stages: int, built_for: Built, options: argparse.Namespace) -> Settings:
    """The settings, over those of `mplug bench`, of a run with micro batches of one sample."""
    schedule, chunks = built_for
    given = [f"parallel.layout=pp{stages}", f"parallel.pp.schedule={schedule}", f"parallel.pp.chunks={chunks}"]
    given += [f"trainer.precision={options.precision}"]
    given += [f"model.preset={options.preset}"] if options.preset else []
    given += [f"trainer.seq_length={options.seq_length}", "trainer.micro_batch_size=1"]
    given += [f"trainer.global_batch_size={options.measured}"]
    return read_assignments([*given, *options.assignments], "--set")


def gib(number: float) -> str:
    """GiB with two digits; on a CPU with six."""
    return f"{number / GIB:.{2 if torch.cuda.is_available() else 6}f}"


def main() -> None:
    """Measure all schedules for each number of stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2], help="numbers of stages")
    parser.add_argument("--schedules", nargs="+", default=[name for names in BUILDS.values() for name in names])
    parser.add_argument("--measured", type=int, default=8, help="micro batches of the measured steps")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16], help="of the predicted steps")
    parser.add_argument("--transfer", type=float, default=0.0, help="milliseconds of a transfer in predictions")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each pass")
    parser.add_argument("--preset", default="", help="a preset of the model")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--set", dest="assignments", action="append", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args()
    with ExitStack() as stack:
        stack.enter_context(patch.object(wire, "Wire", LoneWire))
        on_gpu = torch.cuda.is_available()
        meter = OfGpu() if on_gpu else OfCpu(stack.enter_context(LiveBytes()))
        for stages in options.stages:
            costs: dict[str, list[Costs]] = {}
            for built_for, names in BUILDS.items():
                schedules = [name for name in names if name in options.schedules]
                if schedules:
                    costs |= dict.fromkeys(schedules, measure(stages, built_for, options, meter)[1])
            predict(stages, costs, options)


if __name__ == "__main__":
    main()
