"""Grouped matrix products of experts alone: torch, QuACK and FP8, beside a dense product of the same FLOPs.

    python benchmarks/grouped.py [--shapes coarse fine] [--suppliers torch quack fp8] [--tiles] [--casts] [--out FILE]

The shapes are those of benchmarks/experts.py. Every product is measured under an even load and one drawn at random
(the largest group has about twice the mean). `up` and `down` are the products of rows, `rows` the gradients of rows,
`weights` the gradients of weights, written into fp32 (`first`) or added to it (`next`). FP8 includes the casts of rows
(in the products of rows), and not those of weights, which happen once a step.

Each result is compared with torch's first: the largest difference as a part of the largest value. `--tiles` measures
QuACK's products with other tiles, and `--casts` the cast to FP8. A supplier that cannot run here is left out, and its
reason is printed.
"""

import argparse
import inspect
import itertools
import json
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mplug_estimates import timed
from mplug_nn import GroupedProduct, Operand, Sink
from mplug_nn.grouped import PLAIN_GROUPED

SHAPES = {"coarse": (2048, 6400, 8, 32768), "fine": (2048, 1408, 64, 98304), "tiny": (64, 32, 4, 256)}
"""Width, width of an expert, experts, rows."""
PACKAGES = ("torch", "triton", "quack-kernels", "nvidia-cutlass-dsl")
TILES = ((128, 192, True, 2, 1), (128, 256, False, 2, 1), (256, 128, False, 2, 1), (256, 192, False, 2, 1))
TILES_OF_FINE = ((128, 192, True, 1, 2), (128, 256, False, 1, 2), (128, 128, True, 2, 1))


def suppliers(names: list[str]) -> Iterator[tuple[str, GroupedProduct]]:
    """The named suppliers that can be imported here."""
    for name in names:
        try:
            yield name, supplier(name)
        except Exception as error:
            print(f"{name}: none: {error}", flush=True)


def supplier(name: str) -> GroupedProduct:
    """The content of `Experts.product` by name."""
    if name == "torch":
        return PLAIN_GROUPED
    if name == "quack":
        from mplug_quack.grouped import QuackGroups
        from quack.gemm import gemm

        print(f"quack.gemm.gemm{inspect.signature(gemm)}", flush=True)
        return QuackGroups()
    from mplug_fp8.grouped import RowwiseGroups
    from mplug_fp8.recipes import Options

    return RowwiseGroups(Options(power_of_two=True))


def counts(load: str, rows: int, experts: int) -> Tensor:
    """Rows of each group [e]."""
    if load == "even":
        return torch.full((experts,), rows // experts)
    weight = (torch.randn(experts, generator=torch.Generator().manual_seed(0)) * 0.5).exp()
    found = (rows * weight / weight.sum()).long()
    found[0] += rows - found.sum()
    return found


class Figure(NamedTuple):
    """The seconds of a product of a shape under a load by a supplier, and its FLOPs."""

    shape: str
    load: str
    supplier: str
    part: str
    seconds: float
    flops: float

    def __str__(self) -> str:
        rate = self.flops / self.seconds / 1e12
        return (
            f"{self.shape:7}{self.load:7}{self.supplier:34}{self.part:27}{1e3 * self.seconds:9.3f} ms"
            f"{rate:7.0f} TFLOP/s"
        )


class Layer:
    """The products of one expert layer under a load."""

    def __init__(self, shape: str, load: str, device: str) -> None:
        width, ffn, experts, rows = SHAPES[shape]
        self.width, self.ffn, self.device = width, ffn, device
        self.ends = counts(load, rows, experts).cumsum(0).to(device, torch.int32)
        self.rows, self.hidden, self.wide = (self._drawn(rows, size) for size in (width, ffn, 2 * ffn))
        self.up = self._drawn(experts, 2 * ffn, width, scale=0.02)
        self.down = self._drawn(experts, width, ffn, scale=0.02)
        self.total = torch.zeros(experts, 2 * ffn, width, device=device)
        self.flops = 2.0 * rows * width * ffn

    def _drawn(self, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(len(shape) + shape[-1])
        return (scale * torch.randn(shape, device=self.device, generator=generator)).bfloat16()

    def products(self, product: GroupedProduct) -> dict[str, tuple[Callable[[], Any], float]]:
        """The products by name, each with its FLOPs."""
        up, down = (Operand(weight, product.cast(weight, {})) for weight in (self.up, self.down))
        first = self.gradient(product, torch.ones((), dtype=torch.bool))
        following = self.gradient(product, torch.zeros((), dtype=torch.bool))

        def rows() -> Any:
            saved = product.forward(self.rows, up, self.ends, {})[1]
            return product.dgrad(self.wide, up, saved, self.ends, {}, True)[0]

        return {
            "up": (lambda: product.forward(self.rows, up, self.ends, {})[0], 2 * self.flops),
            "down": (lambda: product.forward(self.hidden, down, self.ends, {})[0], self.flops),
            "up and its rows' gradient": (rows, 4 * self.flops),
            "weights, first": (first, 2 * self.flops),
            "weights, next": (following, 2 * self.flops),
        }

    def casts(self, product: GroupedProduct) -> dict[str, Callable[[], Any]]:
        """What FP8 does besides products: the casts of rows, and of a weight, which happen once a step."""
        if not product.makes_copies:
            return {}
        from mplug_fp8.grouped import cast_grouped

        return {
            "cast of rows": lambda: cast_grouped(self.rows, self.ends, True),
            "cast of wide rows": lambda: cast_grouped(self.wide, self.ends, True),
            "cast of weights": lambda: product.cast(self.up, {}),
        }

    def gradient(self, product: GroupedProduct, stale: Tensor) -> Callable[[], Tensor]:
        """The gradient of the weight `up`, by operands that the passes before it have made."""
        up = Operand(self.up, product.cast(self.up, {}))
        saved = product.forward(self.rows, up, self.ends, {})[1]
        operands = product.dgrad(self.wide, up, saved, self.ends, {}, False)[1]
        again = bool(stale)

        def add() -> Tensor:
            product.wgrad(operands, Sink(self.total, torch.tensor(again)), self.ends, {})
            return self.total

        return add


def measured(work: Callable[[], Any], device: str) -> float:
    """The median seconds of 10 calls after 3."""
    timed(work, 3, device)
    return median(timed(work, 10, device))


def compare(shape: str, load: str, names: list[str], device: str, found: list[Figure]) -> None:
    """Measure and print the products of a shape under a load, by every supplier."""
    layer = Layer(shape, load, device)
    rows = layer.rows
    dense = layer.up[0]
    show(found, Figure(shape, load, "dense", "up", measured(lambda: rows @ dense.t(), device), 2 * layer.flops))
    expected: dict[str, Tensor] = {}
    for name, product in suppliers(names):
        try:
            works = layer.products(product)
        except Exception:  # a kernel that refuses this machine: the others are measured
            print(f"{shape} {load} {name}: none: {traceback.format_exc()[-2500:]}", flush=True)
            continue
        for part, (work, flops) in works.items():
            try:
                layer.total.zero_()
                result = work().float().clone()
                note = difference(result, expected.setdefault(part, result))
                del result
                show(found, Figure(shape, load, name, part, measured(work, device), flops), note)
            except Exception:
                print(f"{shape} {load} {name} {part}: none: {traceback.format_exc()[-2500:]}", flush=True)

        for part, cast in layer.casts(product).items():
            show(found, Figure(shape, load, name, part, measured(cast, device), 0.0))


def difference(result: Tensor, expected: Tensor) -> str:
    """The largest difference as a part of the largest value, and whether all values are finite."""
    part = float((result - expected).abs().max() / expected.abs().max())
    return f"{part:.1e}" + ("" if bool(result.isfinite().all()) else " not finite")


def show(found: list[Figure], figure: Figure, note: str = "") -> None:
    """Keep and print a figure."""
    found.append(figure)
    print(figure, note, flush=True)


def tiles(shape: str, device: str, found: list[Figure]) -> None:
    """QuACK's products with other tiles."""
    import mplug_quack.grouped as grouped

    quack = grouped.QuackGroups()
    for values in (*TILES, *(TILES_OF_FINE if shape == "fine" else ())):
        grouped.SMALL = grouped.LARGE = grouped.Tile(*values)
        layer = Layer(shape, "drawn", device)
        try:
            works = layer.products(quack)
            for part in ("up", "up and its rows' gradient", "weights, first"):
                work, flops = works[part]
                show(found, Figure(shape, "drawn", f"quack {values}", part, measured(work, device), flops))
        except Exception as error:
            print(f"{shape} quack {values}: none: {type(error).__name__}: {error}"[:400], flush=True)


def casts(shape: str, device: str) -> None:
    """The cast of wide rows to FP8 with other tiles: milliseconds and GB/s of a call."""
    import mplug_fp8.emulation as emulation
    import mplug_fp8.launch as launch

    layer, given = Layer(shape, "drawn", device), (emulation.GROUP, dict(launch.GROUPED))
    moved = layer.wide.numel() * 6  # two reads of bf16, two writes of FP8
    for group, columns, warps in itertools.product((32, 64, 128), (64, 128, 256), (4, 8)):
        emulation.GROUP = launch.GROUP = group
        launch.GROUPED.update(TILE_N=group, TILE_I=columns, num_warps=warps)
        try:
            seconds = measured(lambda: launch.cast_grouped(layer.wide, layer.ends, True), device)
            print(
                f"{shape:7}cast of wide rows, tile {group:4} x{columns:4}, {warps} warps{1e3 * seconds:9.3f} ms", end=""
            )
            print(f"{moved / seconds / 1e9:8.0f} GB/s", flush=True)
        except Exception as error:
            print(
                f"{shape} tile {group} x {columns}, {warps} warps: none: {type(error).__name__}: {error}"[:300],
                flush=True,
            )
    emulation.GROUP = launch.GROUP = given[0]
    launch.GROUPED.update(given[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["coarse", "fine"])
    parser.add_argument("--suppliers", nargs="*", choices=["torch", "quack", "fp8"], default=["torch", "quack", "fp8"])
    parser.add_argument("--loads", nargs="+", choices=["even", "drawn"], default=["even", "drawn"])
    parser.add_argument("--tiles", action="store_true", help="measure QuACK's products with other tiles, too")
    parser.add_argument("--casts", action="store_true", help="measure the cast to FP8 with other tiles, too")
    parser.add_argument("--out", help="file for the figures, in JSON")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for package in PACKAGES:
        try:
            print(package, version(package), end="; ")
        except PackageNotFoundError:
            print(package, "none", end="; ")
    print(flush=True)
    found: list[Figure] = []
    for shape in chosen.shapes:
        for load in chosen.loads:
            compare(shape, load, chosen.suppliers, device, found)
        if chosen.casts and find_spec("triton") is not None:
            casts(shape, device)
        if chosen.tiles and find_spec("quack") is not None:
            tiles(shape, device, found)
        if chosen.out:
            Path(chosen.out).write_text(json.dumps([one._asdict() for one in found], indent=1))


if __name__ == "__main__":
    main()
