"""How much of the communication of tensor parallelism is hidden, for each linear of a block.

    python benchmarks/tp_overlap.py [--ranks 2] [--shapes 7.1b 16b] [--iterations 20] [--out tp_overlap.json]

One process per GPU; on a CPU the sizes are small and the times only show that the script runs. Each line is a linear
and a direction, in milliseconds of the slowest rank (median of five rounds, in which the variants take turns):

    products      the matrix products alone, whole
    chunks        the same products chunk by chunk, without transfers
    waiting       collectives of the process group before or after the products (`parallel.tp.overlap=false`)
    messages      chunks that travel as messages of the process group
    copies        chunks that travel as copies between GPUs (skipped if they do not reach each other's memory)
    samples       the same in chunks of whole samples (`parallel.tp.chunks=samples`)

EXPOSED is the time beyond `products`. ERROR is the relative error of the results against fp64.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mplug_tp.boundary import boundary
from mplug_tp.messages import Messages, part_of, pieces_of, place_of
from mplug_tp.peers import Peers
from mplug_tp.product import Overlapped
from mplug_tp.samples import Samples
from torch import Tensor

from mplug.cli.tables import table
from mplug_nn import Arrival, Boundary, ChunkedCollectives, Narrow, Operand, Produce, Product, Rows, Sink
from mplug_nn.chunked_collectives import flattened, name_collectives
from mplug_nn.product import COMPOSED
from mplug_ops import reachable

HEADER = ("LINEAR", "PASS", "VARIANT", "MS", "EXPOSED MS", "PRODUCTS/MS", "ERROR")
WIDTHS = {"7.1b": 4096, "16b": 6144, "1.7b": 2048, "tiny": 64}
ROUNDS = 5
VARIANTS = ("products", "chunks", "waiting", "messages", "copies", "samples")


@dataclass(frozen=True)
class Layer:
    """A linear of a block: [inputs] -> [outputs] of the whole model, column- or row-parallel."""

    name: str
    inputs: int
    outputs: int
    column: bool


def layers(width: int) -> list[Layer]:
    """The linears of a GPT's block."""
    return [
        Layer("qkv", width, 3 * width, column=True),
        Layer("out", width, width, column=False),
        Layer("up", width, 4 * width, column=True),
        Layer("down", 4 * width, width, column=False),
    ]


class Still(ChunkedCollectives):
    """The chunks without transfers: rows of other ranks are whatever memory holds."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.num_parts = rank, size

    def gathering(self, *parts: Tensor, keep: bool) -> Arrival:
        """Rows that are here already."""
        return StillArrival(self, parts)

    def summing(
        self, partial: tuple[int, ...], like: Tensor, produce: Produce, fill: Callable[[], None] | None = None
    ) -> Tensor:
        """The products of a ring."""
        length = partial[-2] // self.num_parts
        total = like.new_empty((*partial[:-2], length, partial[-1]))
        own = flattened(total)
        for step in range(self.num_parts):
            if fill is not None and step == self.num_parts - 1:
                fill()
            for piece in pieces_of(*own.shape[:2]):
                produce(part_of(piece, (self.rank - 1 - step) % self.num_parts, length), own[piece], step > 0)
        return total


class StillArrival(Arrival):
    """The rows of a `Still`."""

    wholes: dict[tuple[Any, ...], Tensor] = {}  # noqa: RUF012 (one tensor per shape for all calls)

    def __init__(self, chunked: Still, parts: tuple[Tensor, ...]) -> None:
        self._chunked, (self._part,) = chunked, parts
        samples, length, width = self._part.shape
        shape = samples, chunked.num_parts * length, width
        self._whole = self.wholes.setdefault((shape, parts[0].dtype), parts[0].repeat(1, chunked.num_parts, 1))

    def __iter__(self) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
        """This rank's rows, then the others'."""
        length = self._part.shape[1]
        for step in range(self._chunked.num_parts):
            rows = place_of((self._chunked.rank - step) % self._chunked.num_parts, length)
            yield rows, (rows.of(self._whole) if step else self._part,)

    def whole(self) -> tuple[Tensor, ...]:
        """The tensor of all rows."""
        return (self._whole,)


@dataclass
class Case:
    """The tensors of a linear on a rank, and its two passes by a product."""

    x: Tensor
    weight: Tensor
    grad_y: Tensor
    sink: Sink
    column: bool

    def forward(self, product: Product, around: Boundary | None) -> Tensor:
        """The output."""
        return product.forward(self.x, Operand(self.weight), self._narrow(around), {})[0]

    def backward(self, product: Product, around: Boundary | None) -> Tensor:
        """The gradient of the input; the weight's is added to the sink."""
        operand, narrow = Operand(self.weight), self._narrow(around)
        grad_x, _ = product.backward(self.grad_y, operand, (self.x,), self.sink, narrow, {}, True)
        assert grad_x is not None
        return grad_x

    def _narrow(self, around: Boundary | None) -> Narrow:
        return Narrow(before=around) if self.column else Narrow(after=around)


def case(layer: Layer, options: argparse.Namespace, device: torch.device) -> Case:
    """Random tensors, with the shapes that a rank has under sequence parallelism."""
    batch, length, size = options.batch, options.sequence, options.ranks
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    part, inputs, outputs = length // size, layer.inputs, layer.outputs
    if layer.column:
        x, grad_y = drawn(batch, part, inputs), drawn(batch, length, outputs // size)
        weight = drawn(outputs // size, inputs)
    else:
        x, grad_y = drawn(batch, length, inputs // size), drawn(batch, part, outputs)
        weight = drawn(outputs, inputs // size)
    total = torch.zeros(weight.shape, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return Case(x, weight * layer.inputs**-0.5, grad_y, Sink(total, torch.zeros((), dtype=torch.bool)), layer.column)


def whole_case(one: Case, size: int) -> Case:
    """The same products without any split of the sequence."""
    x = one.x.repeat(1, size, 1) if one.column else one.x
    grad_y = one.grad_y if one.column else one.grad_y.repeat(1, size, 1)
    return Case(x, one.weight, grad_y, one.sink, one.column)


def seconds(call: Callable[[], Any], iterations: int, device: torch.device) -> float:
    """Seconds of a call, on the slowest rank."""
    dist.barrier()
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(iterations):
            call()
        end.record()
        end.synchronize()
        taken = begin.elapsed_time(end) / 1e3
    else:
        start = time.perf_counter()
        for _ in range(iterations):
            call()
        taken = time.perf_counter() - start
    slowest = torch.tensor(taken / iterations, device=device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def variants(group: dist.ProcessGroup, only: list[str]) -> dict[str, tuple[Product, Boundary | None]]:
    """The product and the boundary of each variant."""
    plain = boundary(group, sequence_parallel=True)
    made: dict[str, ChunkedCollectives] = {"chunks": Still(group.rank(), group.size()), "messages": Messages(group)}
    if {"copies", "samples"} & {*only} and reachable(group):
        peers = made["copies"] = Peers(group)
        made["samples"] = Samples(group, torch.device("cuda", torch.cuda.current_device()), peers)
    found: dict[str, tuple[Product, Boundary | None]] = {"products": (COMPOSED, None), "waiting": (COMPOSED, plain)}
    for name, chunked in made.items():
        name_collectives(name, chunked)
        found[name] = Overlapped(), Boundary(plain.whole, plain.summed, plain.largest, name)
    return {name: how for name, how in found.items() if name in only}


def measured(
    layer: Layer, options: argparse.Namespace, group: dist.ProcessGroup, device: torch.device
) -> list[dict[str, Any]]:
    """A row per pass and variant."""
    one, rows = case(layer, options, device), []
    whole, found = whole_case(one, group.size()), variants(group, options.only)
    for direction in ("forward", "backward"):
        calls: dict[str, Callable[[], Tensor]] = {}
        for name, (product, around) in found.items():
            calls[name] = partial(getattr(whole if name == "products" else one, direction), product, around)
        errors = compared(calls, one, direction, boundary(group, sequence_parallel=True))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(seconds(call, options.iterations, device))
        for name, taken in times.items():
            labels = {"linear": layer.name, "pass": direction, "variant": name}
            rows.append({**labels, "ms": median(taken) * 1e3, "all": taken, "error": errors.get(name)})
    return rows


def compared(calls: dict[str, Callable[[], Tensor]], one: Case, direction: str, around: Boundary) -> dict[str, float]:
    """The relative error of each variant's results against fp64, of the worse of both gradients; it warms up, too."""
    sink = Sink(torch.zeros_like(one.sink.total, dtype=torch.float64), torch.zeros((), dtype=torch.bool))
    exact = Case(one.x.double(), one.weight.double(), one.grad_y.double(), sink, one.column)
    wanted, found = [getattr(exact, direction)(COMPOSED, around), sink.total], {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        one.sink.total.zero_()
        results = [call(), one.sink.total]
        if name in ("waiting", "messages", "copies", "samples"):
            pairs = list(zip(results, wanted, strict=True))[: 1 if direction == "forward" else 2]
            found[name] = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
    return found


def work(rank: int, options: argparse.Namespace, port: int) -> None:
    """One rank."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(options.ranks))
    if on_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    group, found = dist.group.WORLD, {}
    assert group is not None
    for shape in options.shapes:
        torch.manual_seed(rank)
        rows = [row for layer in layers(WIDTHS[shape]) for row in measured(layer, options, group, device)]
        found[shape] = rows
        if rank == 0:
            show(shape, rows, options)
    if rank == 0 and options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


def figures(ms: float, least: float) -> tuple[str, str, str]:
    """(milliseconds, those beyond the products alone, the ratio of the two)."""
    return f"{ms:.3f}", f"{ms - least:.3f}", f"{least / ms:.3f}"


def show(shape: str, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table of a shape, with the sums over the block."""
    base = {(row["linear"], row["pass"]): row["ms"] for row in rows if row["variant"] == "products"}
    lines = []
    for row in rows:
        least = base[row["linear"], row["pass"]]
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        lines.append((row["linear"], row["pass"], row["variant"], *figures(row["ms"], least), error))
    for variant in dict.fromkeys(row["variant"] for row in rows):
        ms = sum(row["ms"] for row in rows if row["variant"] == variant)
        lines.append(("block", "both", variant, *figures(ms, sum(base.values())), ""))
    print(f"{shape}, tp{options.ranks}, {options.batch} samples of {options.sequence}")
    print(table(HEADER, lines), flush=True)


def parsed() -> argparse.Namespace:
    """The command line."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ranks = torch.cuda.device_count() if on_gpu else 2
    parser.add_argument("--ranks", type=int, default=ranks, help="GPUs, or processes on a CPU")
    parser.add_argument("--shapes", nargs="+", choices=WIDTHS, default=["7.1b"] if on_gpu else ["tiny"])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--batch", type=int, default=4, help="samples per micro batch")
    parser.add_argument("--sequence", type=int, default=4096 if on_gpu else 32)
    parser.add_argument("--iterations", type=int, default=20 if on_gpu else 2)
    parser.add_argument("--port", type=int, default=29533)
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    return parser.parse_args()


def main() -> int:
    """Measure, and print a table per shape."""
    options = parsed()
    mp.spawn(work, (options, options.port), nprocs=options.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
