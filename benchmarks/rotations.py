"""What it costs to get queries, keys and values out of their packed projection: milliseconds, forward and backward.

    python benchmarks/rotations.py [--batch 4] [--length 4096] [--heads 16] [--kv-heads 16] [--head-dim 128] [--qk-norm]
        [--supplier mplug_triton.qkv:prepare_qkv]

Tries, with rotary positions, eager and compiled by inductor: the composition of `mplug_nn`, another spelling of the
rotation, and every supplier of `Attention.prepare_qkv` that `--supplier MODULE:FUNCTION` names. Beside the median of
`--repeats` (CUDA events, caches flushed before each) stands how much of it would be needed at `--bandwidth` for the
bytes that must move: queries and keys read and written; backward, all gradients read and the packed one written.
`differs` is the largest difference of a result or gradient from the eager composition's. On a CPU, use a small size.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mplug.cli.tables import table
from mplug.registry.precisions import precision_named
from mplug_nn.attention import prepare_qk, prepare_qkv, rotations

Prepare = Callable[..., tuple[Tensor, Tensor, Tensor]]
EPS, THETA = 1e-5, 10000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("batch", 4), ("length", 4096), ("heads", 16), ("kv-heads", 16), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--qk-norm", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--bandwidth", type=float, default=4.28e12, help="bytes per second of a copy")
    parser.add_argument("--supplier", action="append", default=[], help="MODULE:FUNCTION; may be repeated")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = Problem(options, device)
    print(f"{problem.described()}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}\n")
    reference = problem.outcome(prepare_qkv, problem.unit(prepare_qkv))
    rows = [
        row(problem, f"{name}, {how.__name__}", prepare, how, reference, options)
        for name, prepare in {**SPELLINGS, **named(options.supplier)}.items()
        for how in (eager, inductor)
    ]
    header = ("WHAT", "FORWARD MS", "OF LIMIT", "BACKWARD MS", "OF LIMIT", "BOTH MS", "OF LIMIT", "DIFFERS")
    print(table(header, rows))


def named(suppliers: list[str]) -> dict[str, Prepare]:
    """The suppliers that the command line names."""
    split = {word: word.partition(":") for word in suppliers}
    return {word: getattr(importlib.import_module(module), name) for word, (module, _, name) in split.items()}


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend="inductor", fullgraph=True, dynamic=False)


# Another spelling of the rotation, with the same bits when eager.


def by_slices(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, S, H, K], positions [1 or B, S] -> [B, S, H, K]; the halves by slices, whose backward pads and adds."""
    cos, sin = rotations(positions, x.shape[-1] // 2, THETA, torch.float32)[..., None, :].to(x.dtype)
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def spelt(rotate: Callable[[Tensor, Tensor], Tensor], heads: Tensor, h: int, g: int, *how: Any) -> Any:
    """The composition with another rotation."""
    positions, q_weight, k_weight, eps, _, prepare = how
    q, k, v = heads.split((h, g, g), dim=2)
    q, k = prepare(q, k, positions, q_weight, k_weight, eps, None)
    return rotate(q, positions), rotate(k, positions), v


SPELLINGS: dict[str, Prepare] = {
    "composition": prepare_qkv,
    "by slices": partial(spelt, by_slices),
}


# Measuring.


@torch.library.custom_op("rotations::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stands for attention, without time of its own: wants q, k and v in memory, and hands gradients on as they come.

    A compiled graph that returned v would leave the gradient of that view to eager code around the graph.
    """
    return _like_attended(q, k, v)


@attend.register_fake
def _like_attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


attend.register_autograd(lambda _, *gradients: gradients)


class Problem:
    """The inputs and upstream gradients of one size: B batch, S sequence, H query heads, G KV heads, K head dim."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = device, precision_named(options.dtype).weight_dtype
        self.sizes = (options.batch, options.length, options.heads, options.kv_heads, options.head_dim)
        b, s, h, g, k = self.sizes
        self.heads = self._drawn(b, s, h + 2 * g, k).requires_grad_()
        norms = [(1 + 0.1 * self._drawn(k)).requires_grad_() for _ in range(2)] if options.qk_norm else []
        self.leaves = [self.heads, *norms]
        self.how = (torch.arange(s, device=device)[None], *(norms or (None, None)), EPS, THETA, prepare_qk)
        self.upstream = [self._drawn(b, s, n, k) for n in (h, g, g)]
        row = b * s * k * self.heads.element_size()
        reads_again = (h + g) * row if norms else 0  # the norm's backward needs its input
        self.bytes = (2 * (h + g) * row, 2 * (h + 2 * g) * row + reads_again)

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def described(self) -> str:
        """The size in words, and the bytes that must move."""
        b, s, h, g, k = self.sizes
        forward, backward = (f"{count / 2**20:,.1f} MiB" for count in self.bytes)
        size = f"batch {b}, length {s}, {h} heads and {g} KV heads of {k}, {self.dtype}"
        return f"{size}; {forward} forward and {backward} backward must move"

    def prepared(self, prepare: Prepare) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return prepare(self.heads, self.sizes[2], self.sizes[3], *self.how)

    def unit(self, prepare: Prepare) -> Prepare:
        """From packed heads to what stands for attention."""
        h, g = self.sizes[2:4]

        def run(heads: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
            attended: tuple[Tensor, Tensor, Tensor] = attend(*prepare(heads, h, g, *how))
            return attended

        return run

    def outcome(self, prepare: Prepare, run: Prepare) -> list[Tensor]:
        """What is prepared, eager, and the gradients as they are measured."""
        done = run(self.heads, *self.how)
        return [*(x.detach() for x in self.prepared(prepare)), *torch.autograd.grad(done, self.leaves, self.upstream)]

    def times(self, run: Prepare) -> tuple[float, float]:
        """Seconds of one forward and of its backward pass."""
        self._flush()
        clock = Clock(self.device)
        done = run(self.heads, *self.how)
        forward = clock.seconds()
        self._flush()
        clock = Clock(self.device)
        torch.autograd.grad(done, self.leaves, self.upstream)
        return forward, clock.seconds()

    def _flush(self) -> None:
        """Nothing that is read is in a cache, as in a step; and the GPU is busy while work queues up behind it."""
        if self.device == "cuda":
            torch.empty(1 << 32, dtype=torch.uint8, device=self.device).zero_()


class Clock:
    """Time on the device since it was made."""

    def __init__(self, device: str) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
        self.began = time.perf_counter()
        if self.events:
            self.events[0].record()

    def seconds(self) -> float:
        """Since then, once the device is done."""
        if not self.events:
            return time.perf_counter() - self.began
        self.events[1].record()
        torch.cuda.synchronize()
        return float(self.events[0].elapsed_time(self.events[1])) / 1e3


def row(
    problem: Problem,
    name: str,
    prepare: Prepare,
    how: Callable[..., Any],
    reference: list[Tensor],
    options: argparse.Namespace,
) -> tuple[str, ...]:
    """A line of the table."""
    run = how(problem.unit(prepare))
    found = problem.outcome(prepare, run)
    differs = max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, reference, strict=True))
    for _ in range(3):
        problem.times(run)
    runs = [problem.times(run) for _ in range(options.repeats)]
    times = [statistics.median(way) for way in zip(*runs, strict=True)]
    limits = [count / options.bandwidth for count in problem.bytes]
    cells = []
    for took, limit in ((times[0], limits[0]), (times[1], limits[1]), (sum(times), sum(limits))):
        cells += [f"{took * 1e3:.3f}", f"{limit / took:.0%}"]
    return name, *cells, f"{differs:.1e}"


if __name__ == "__main__":
    main()
