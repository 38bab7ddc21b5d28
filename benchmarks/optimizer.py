"""What an update costs: milliseconds, and the rate at which the bytes that it must move are moved.

    python benchmarks/optimizer.py [--parameters 1.7e9] [--repeats 20] [--device cuda]

Parameters have the shapes of 24 blocks and two tables, bf16 weights, fp32 gradients in one arena, masters and moments.
An update reads gradient, master and moments, and writes master, moments and the weight: 30 bytes a parameter. Torch's
fused implementation scales gradients in memory too, and needs the host to round masters into weights; the kernel does
all in one pass. Nobody zeroes gradients: a step's first product overwrites them.
Paths take turns; times are medians.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator

import torch
from mplug_adamw import AdamW
from mplug_adamw.fused import FusedAdamW
from mplug_adamw.implementation import optimizer_of

from mplug import Init, Mesh, Optimizer, Parameter, Piece, Placement, Sinks, StepScalars
from mplug.cli.tables import table
from mplug.gradients.norm import GlobalNorm, owned_gradients
from mplug.model.pieces import write_weights
from mplug.training.hardware import Moment, peak_memory_gib

LAYERS = 24
Path = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1.7e9, help="about so many")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    sinks, pieces = made(options.parameters, options.device)
    owned, total = owned_gradients(pieces, 0), sinks.arena.numel()
    norms = {"by gradient": GlobalNorm(owned, "cpu"), "by stretch": GlobalNorm(owned, "cuda")}  # as on these devices
    with torch.no_grad():
        measured = measure(paths(sinks, pieces, norms, options.device), sinks.arena, options)
    print(f"{total:,} parameters in {len(pieces)} pieces on {options.device}, medians of {options.repeats}\n")
    rows = [
        (name, f"{1e3 * seconds:.3f}", f"{num_bytes}", f"{num_bytes * total / seconds / 1e9:,.0f}")
        for (name, num_bytes), seconds in measured.items()
    ]
    print(table(("PATH", "MS", "BYTES A PARAMETER", "GB/S"), rows))
    exact = float(torch.linalg.vector_norm(sinks.arena.normal_(), dtype=torch.float64))
    off = ", ".join(f"{name} {abs(float(norm()) / exact - 1):.1e}" for name, norm in norms.items())
    print(f"\nnorms are off by (relative): {off}; {peak_memory_gib(options.device):.1f} GiB at most")


def shapes(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a GPT of `width`, with a vocabulary of 64 times as many tokens."""
    yield "embedding", (64 * width, width)
    for layer in range(LAYERS):
        yield f"{layer}.norm1", (width,)
        yield f"{layer}.qkv", (3 * width, width)
        yield f"{layer}.out", (width, width)
        yield f"{layer}.norm2", (width,)
        yield f"{layer}.up", (4 * width, width)
        yield f"{layer}.down", (width, 4 * width)
    yield "norm", (width,)
    yield "head", (64 * width, width)


def made(parameters: float, device: str) -> tuple[Sinks, list[Piece]]:
    """Gradients in one arena, and the pieces: of a width that is a multiple of 128."""
    width = 128 * max(1, round(math.sqrt(parameters / (12 * LAYERS + 128)) / 128))
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes(width)}
    sinks = Sinks({name: torch.nn.Parameter(weight) for name, weight in weights.items()})
    pieces = []
    for name, weight in weights.items():
        described = Parameter(tuple("oi"[: weight.dim()]), Init("constant"))
        placement = Placement(name, described, tuple(weight.shape), Mesh.of([], 1))
        pieces.append(Piece(name, weight.float(), sinks[name].buffer, weight, described, placement))
    return sinks, pieces


def paths(sinks: Sinks, pieces: list[Piece], norms: dict[str, GlobalNorm], device: str) -> dict[tuple[str, int], Path]:
    """(what is measured, bytes a parameter that it must move) -> what does it."""
    ones, zero = torch.ones((), device=device), torch.zeros((), device=device)
    scalars = StepScalars(1e-3 * ones, ones, zero, 0.1 * ones)
    fused: Optimizer = FusedAdamW(pieces, AdamW.Config())

    def in_two_passes() -> None:
        fused.step(scalars)
        write_weights(pieces)

    found: dict[tuple[str, int], Path] = {
        ("torch's fused update", 32): lambda: fused.step(scalars),
        ("  then weights", 6): lambda: write_weights(pieces),
        ("both", 36): in_two_passes,
    }
    chosen = optimizer_of(pieces, AdamW.Config())
    if chosen.one_pass:
        found["one pass", 30] = lambda: chosen.step(scalars)
    return found | {(f"norm {name}", 4): norm for name, norm in norms.items()}


def measure(
    of: dict[tuple[str, int], Path], gradients: torch.Tensor, options: argparse.Namespace
) -> dict[tuple[str, int], float]:
    """Median seconds of each path, of new gradients each time, after one call of each that is not counted."""
    seconds: dict[tuple[str, int], list[float]] = {name: [] for name in of}
    for _ in range(options.repeats + 1):
        for name, path in of.items():
            gradients.normal_()
            before = Moment(options.device)
            path()
            after = Moment(options.device)
            after.wait()
            seconds[name].append(after.since(before))
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


if __name__ == "__main__":
    main()
