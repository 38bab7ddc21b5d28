"""What FP8 products cost: microseconds and TB/s of the kernels that quantise, TFLOP/s of the products beside bf16's.

    python benchmarks/fp8.py [--rows 16384] [--width 2048] [--repeats 30]

The first table has each kernel of mplug-fp8 over activations [rows, width] and a weight [4 width, width]. TB/s counts
the bytes that must move and no others: the tensor read once (twice if a maximum must be known before), the fp8 numbers
written once or, with their transpose, twice. The second table has the three products of a layer from `width` to 4
`width` with operands that are quantised already. The third table has the whole layer: forward and both gradients, with
all quantisation except that of the weight, which happens once per step. Times are medians by the GPU's clock; caches
are flushed before each call. It needs a GPU.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from mplug_fp8 import operators as fp8
from mplug_fp8.products import Blockwise, Delayed, Rowwise, Tensorwise
from mplug_fp8.recipes import Options
from mplug_fp8.scaled import Products
from torch import Tensor

from mplug.cli.tables import table
from mplug_nn import Narrow, Operand, Sink

ALONE = Narrow()
Row = tuple[str, ...]
E5M2 = True


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rows", 16384), ("width", 2048), ("repeats", 30)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)
    if options.rows < 128 or options.width % 128 or options.repeats < 1:
        parser.error("--rows must be at least 128, --width a multiple of 128, and --repeats at least 1")
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU on this machine, and this script measures kernels on a GPU")
    clock = Clock(options.repeats)
    layer = Layer(options.rows, options.width)
    print(f"{options.rows:,} rows of {options.width:,} in bf16, {torch.cuda.get_device_name()}\n")
    print(table(("KERNEL", "US", "TB/S"), list(kernels(layer, clock))), "\n")
    print(table(("PRODUCT", "RECIPE", "US", "TFLOP/S", "OF BF16"), list(products(layer, clock))), "\n")
    print(table(("LAYER", "US", "TFLOP/S", "OF BF16"), list(layers(layer, clock))))


class Clock:
    """Median times by the GPU's clock."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def seconds(self, call: Callable[[], Any]) -> float:
        """The median time of a call, after two that are not measured."""
        times: list[float] = []
        for turn in range(self.repeats + 2):
            self.flushed.zero_()
            torch.cuda._sleep(1_000_000)  # meanwhile the CPU launches the call
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn > 1:
                times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)


class Layer:
    """Random operands of a layer from `width` to 4 `width`, and of its backward pass."""

    def __init__(self, rows: int, width: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)

        self.x, self.grad_y, self.weight = drawn(rows, width), drawn(rows, 4 * width), drawn(4 * width, width) / 50
        self.total = torch.zeros(self.weight.shape, device="cuda")
        self.buffers = {
            name: torch.ones((1,) if "scale" in name else (), device="cuda")
            for name in ("input", "gradient", "input_scale", "gradient_scale")
        }

    @property
    def sink(self) -> Sink:
        """A sink that holds the gradient of the last step."""
        return Sink(self.total, torch.ones((), dtype=torch.bool))


def recipes() -> dict[str, Products]:
    """The products of each recipe."""
    rowwise, blockwise = Rowwise(Options(power_of_two=True)), Blockwise(Options(power_of_two=True))
    return {
        "tensorwise": Tensorwise(Options()),
        "delayed": Delayed(Options()),
        "rowwise": rowwise,
        "blockwise": blockwise,
    }


def kernels(layer: Layer, clock: Clock) -> Iterator[Row]:
    """The time and the rate of each kernel."""
    x, weight, scale = layer.x, layer.weight, layer.buffers["input_scale"]
    statistic, found = layer.buffers["input"], fp8.largest(layer.x)
    rows, _, _ = fp8.cast(x, found, False, False, True, False)
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "copy in bf16": (lambda: x.clone(), 4 * x.numel()),
        "largest value": (lambda: fp8.largest(x), 2 * x.numel()),
        "cast": (lambda: fp8.cast(x, found, False, False, True, False), 3 * x.numel()),
        "cast and transpose": (lambda: fp8.cast(x, found, False, False, True, True), 4 * x.numel()),
        "tensorwise": (lambda: fp8.cast(x, fp8.largest(x), False, False, True, True), 6 * x.numel()),
        "delayed": (lambda: fp8.cast_scaled(x, scale, statistic, False, False, True, True), 4 * x.numel()),
        "delayed, E5M2": (lambda: fp8.cast_scaled(x, scale, statistic, E5M2, False, True, True), 4 * x.numel()),
        "transpose of fp8": (lambda: fp8.transposed(rows), 2 * x.numel()),
        "rowwise": (lambda: fp8.cast_rowwise(x[None], True, True, True), 6 * x.numel()),
        "blockwise": (lambda: fp8.cast_lines(x, True, True), 4 * x.numel()),
        "blocks of a weight": (lambda: fp8.cast_blocks(weight, True, True), 4 * weight.numel()),
    }
    for name, (call, moved) in calls.items():
        seconds = clock.seconds(call)
        yield name, f"{seconds * 1e6:.1f}", f"{moved / seconds / 1e12:.2f}"


def products(layer: Layer, clock: Clock) -> Iterator[Row]:
    """The time and the rate of each product, with operands in fp8."""
    x, grad_y, weight, total = layer.x, layer.grad_y, layer.weight, layer.total
    plain: dict[str, Callable[[], Any]] = {
        "forward": lambda: x @ weight.t(),
        "dgrad": lambda: grad_y @ weight,
        "wgrad, fp32": lambda: torch.addmm(total, grad_y.t(), x, out_dtype=torch.float32, beta=0, out=total),
    }
    flops, usual = 2 * x.numel() * len(weight), {}
    for name, call in plain.items():
        usual[name] = clock.seconds(call)
        yield name, "bf16", *_rates(usual[name], flops), "1.00"
    for recipe, product in recipes().items():
        for name, call in _of(product, layer).items():
            seconds = clock.seconds(call)
            yield name, recipe, *_rates(seconds, flops), f"{usual[name] / seconds:.2f}"


def _of(product: Products, layer: Layer) -> dict[str, Callable[[], Any]]:
    operand = Operand(layer.weight, product.cast(layer.weight, layer.buffers))
    weight, transposed = product.weight_rows(operand), product.weight_columns(operand)
    (rows, inverse), columns = product.quantised(layer.x, product.measured(layer.x, None), "input", layer.buffers)
    (g_rows, g_inverse), g_columns = product.quantised(
        layer.grad_y, product.measured(layer.grad_y, None), "gradient", layer.buffers
    )
    kinds = product.line, product.block
    return {
        "forward": lambda: fp8.multiply(rows, weight.values, inverse, weight.inverse, *kinds, product.fast),
        "dgrad": lambda: fp8.multiply(g_rows, transposed.values, g_inverse, transposed.inverse, *kinds, False),
        "wgrad, fp32": lambda: product.wgrad((*g_columns, *columns), layer.sink, ALONE, layer.buffers),
    }


def layers(layer: Layer, clock: Clock) -> Iterator[Row]:
    """The time and the rate of a whole layer."""
    x, grad_y, weight, total = layer.x, layer.grad_y, layer.weight, layer.total

    def plain() -> None:
        x @ weight.t()
        grad_y @ weight
        torch.addmm(total, grad_y.t(), x, out_dtype=torch.float32, beta=0, out=total)

    flops, usual = 6 * x.numel() * len(weight), clock.seconds(plain)
    yield "bf16", *_rates(usual, flops), "1.00"
    for recipe, product in recipes().items():
        operand = Operand(weight, product.cast(weight, layer.buffers))

        def whole(product: Products = product, operand: Operand = operand) -> None:
            _, saved = product.forward(x, operand, ALONE, layer.buffers)
            product.backward(grad_y, operand, saved, layer.sink, ALONE, layer.buffers, True)

        seconds = clock.seconds(whole)
        yield recipe, *_rates(seconds, flops), f"{usual / seconds:.2f}"


def _rates(seconds: float, flops: int) -> Row:
    return f"{seconds * 1e6:.1f}", f"{flops / seconds / 1e12:.0f}"


if __name__ == "__main__":
    main()
