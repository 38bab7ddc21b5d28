"""What a norm costs, with the residual addition before it: microseconds and terabytes a second, forward and backward.

    python benchmarks/norms.py [--rows 16384] [--width 2048] [--kind layernorm] [--bias]
        [--supplier mplug_triton.norm:norm_residual]

Puts the composition of `mplug_nn`, compiled by inductor, beside every supplier of `Norm.norm_residual` that `--supplier
MODULE:FUNCTION` names, without a residual and with one. Times are medians of `--repeats` by the GPU's clock, caches
flushed before each pass. TB/s counts the bytes that must move and no others: forward, x and the residual read, the
normed sum and the sum written (without a residual the sum is x, and is not); backward, the two gradients and the sum
read, one gradient written. `differs` is the largest difference of a result or gradient from the eager composition's,
relative to the largest number of it. It needs a GPU.
"""

import argparse
import importlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mplug.cli.tables import table
from mplug.registry.precisions import precision_named
from mplug.training.hardware import Moment
from mplug_nn.norm import norm_residual
from mplug_nn.norm_functions import NORMS

NormResidual = Callable[..., tuple[Tensor, Tensor]]
EPS = 1e-5
HEADER = ("WHAT", "RESIDUAL", "FORWARD US", "TB/S", "BACKWARD US", "TB/S", "DIFFERS")
TRITON = "mplug_triton.norm:norm_residual"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--kind", choices=NORMS.list.names(), default="layernorm")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--supplier", action="append", help=f"MODULE:FUNCTION; may be repeated ({TRITON})")
    options = parser.parse_args(arguments)
    for name in ("rows", "width", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU on this machine, and this script measures norms on a GPU")
    try:
        ways = {"plain torch": norm_residual, **named(options.supplier or [TRITON])}
    except (AttributeError, ImportError, ValueError) as error:
        parser.error(f"--supplier must be MODULE:FUNCTION of an installed package: {error}")
    size = f"{options.rows:,} rows of {options.width:,} in {options.dtype}"
    print(f"{options.kind}{' with a bias' if options.bias else ''}, {size}, {torch.cuda.get_device_name()}\n")
    problems = [Problem(options, residual, "cuda") for residual in (False, True)]
    print(
        table(
            HEADER, [row(problem, name, norm, options.repeats) for problem in problems for name, norm in ways.items()]
        )
    )


def named(suppliers: list[str]) -> dict[str, NormResidual]:
    """The suppliers that the command line names."""
    found = {}
    for word in suppliers:
        module, _, name = word.partition(":")
        found[word] = getattr(importlib.import_module(module), name)
    return found


@torch.library.custom_op("norms::use", mutates_args=())
def use(normed: Tensor, summed: Tensor) -> tuple[Tensor, Tensor]:
    """Stands for the rest of a block, without time of its own: wants both in memory, and hands gradients on.

    A compiled graph that returned x as the sum would leave adding that gradient to eager code around the graph.
    """
    return _like_used(normed, summed)


@use.register_fake
def _like_used(normed: Tensor, summed: Tensor) -> tuple[Tensor, Tensor]:
    return normed.new_empty(normed.shape), summed.new_empty(summed.shape)


use.register_autograd(lambda _, *gradients: gradients)


class Problem:
    """The inputs [N, D] and upstream gradients of a norm, with a residual or without."""

    def __init__(self, options: argparse.Namespace, residual: bool, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.residual, self.kind = device, residual, options.kind
        dtype, shape = precision_named(options.dtype).weight_dtype, (options.rows, options.width)
        inputs = {"x": 0.5 + torch.randn(shape), "weight": 1 + 0.1 * torch.randn(options.width)}
        if residual:
            inputs["residual"] = torch.randn(shape)
        if options.bias:
            inputs["bias"] = torch.randn(options.width)
        self.leaves = {name: x.to(device, dtype).requires_grad_() for name, x in inputs.items()}
        self.upstream = [torch.randn(shape).to(device, dtype) for _ in range(2)]
        moved = options.rows * options.width * dtype.itemsize
        self.bytes = ((4 if residual else 2) * moved, 4 * moved)

    def call(self, norm: NormResidual) -> tuple[Tensor, Tensor]:
        """The normed sum and the sum."""
        given = self.leaves
        return norm(given["x"], given.get("residual"), given["weight"], given.get("bias"), EPS, self.kind)

    def compiled(self, norm: NormResidual) -> NormResidual:
        """The norm, and what stands for the rest of a block."""

        def unit(*arguments: Any) -> tuple[Tensor, Tensor]:
            used: tuple[Tensor, Tensor] = use(*norm(*arguments))
            return used

        torch.compiler.reset()
        return torch.compile(unit, backend="inductor", fullgraph=True, dynamic=False)

    def outcome(self, norm: NormResidual) -> list[Tensor]:
        """What comes out, and all gradients, eager."""
        outputs = self.call(norm)
        gradients = torch.autograd.grad(outputs, list(self.leaves.values()), self.upstream)
        return [*(x.detach() for x in outputs), *gradients]

    def times(self, run: NormResidual) -> tuple[float, float]:
        """Seconds of one forward and of its backward pass."""
        forward, done = self._timed(lambda: self.call(run))
        backward, _ = self._timed(lambda: torch.autograd.grad(done, list(self.leaves.values()), self.upstream))
        return forward, backward

    def _timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Nothing that is read is in a cache, as in a step; and the GPU is busy while work queues up behind that."""
        if self.device == "cuda":
            torch.empty(1 << 32, dtype=torch.uint8, device=self.device).zero_()
        before = Moment(self.device)
        done = work()
        after = Moment(self.device)
        after.wait()
        return after.since(before), done


def difference(problem: Problem, norm: NormResidual) -> float:
    """The largest of a result's or gradient's differences from the composition's, relative to its largest number."""
    pairs = zip(problem.outcome(norm), problem.outcome(norm_residual), strict=True)
    return max(
        float((ours.double() - plain.double()).abs().max() / plain.double().abs().max()) for ours, plain in pairs
    )


def row(problem: Problem, name: str, norm: NormResidual, repeats: int) -> tuple[str, ...]:
    """A line of the table."""
    run = problem.compiled(norm)
    for _ in range(3):
        problem.times(run)
    runs = [problem.times(run) for _ in range(repeats)]
    cells = []
    for way, count in zip(zip(*runs, strict=True), problem.bytes, strict=True):
        seconds = statistics.median(way)
        cells += [f"{seconds * 1e6:.1f}", f"{count / seconds / 1e12:.2f}"]
    return name, "yes" if problem.residual else "no", *cells, f"{difference(problem, norm):.1e}"


if __name__ == "__main__":
    main()
