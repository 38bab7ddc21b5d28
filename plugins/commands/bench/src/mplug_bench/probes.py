"""Work of usual shapes alone, whose rates are limits of the machine: they do not depend on a model.

M rows, N columns, and K the depth (the inner dimension) of a product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from mplug_estimates import timed
from mplug_nn.grouped import add_grouped_product, grouped_product

SQUARES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (128, 512)}
"""Numbers of rows and columns of the square products, ascending."""
DEEP = {"cuda": (8192, (512, 1024, 2048, 4096, 16384)), "cpu": (128, (64,))}
"""Rows and columns of the products of other depths, and these depths."""
EIGHT_BITS = (8192, (1024, 2048, 8192))
"""The same for products in 8 bits, which GPUs of compute capability 8.9 and above have."""
GROUPS = {"cuda": ((8, 4096, 2048, 6400), (64, 1536, 2048, 1408)), "cpu": ((2, 64, 32, 48),)}
"""Groups, rows of each, input width and output width of the grouped products."""
COPIED = {"cuda": 2**30, "cpu": 2**24}
"""Number of bytes that are copied within memory."""
WIDTHS = {"cuda": (16384, 2048), "cpu": (64, 64)}
"""Rows and columns of the kernels between products; an activation has four times as many columns."""
BETWEEN = 2**28
"""Number of bytes that are copied between a GPU and the memory of the CPU."""
LAUNCHED = 1000
"""Number of kernels that are launched in a row."""
REPEATS, WARMUP = 20, 3


@dataclass(frozen=True)
class Work:
    """A part of a step: FLOPs per call, calls per step; `prepare` makes the operands, and returns the call."""

    flops: int
    calls: int
    prepare: Callable[[], Callable[[], object]]


def products(dtype: torch.dtype, device: str) -> dict[str, Work]:
    """Products of dense matrices, by a description without its unit."""
    name = str(dtype).rpartition(".")[2]
    found = {
        f"{name} product of {size} x {size} matrices": _dense(size, size, size, dtype, device)
        for size in SQUARES[device]
    }
    side, depths = DEEP[device]
    for depth in depths:
        found[f"{name} product of {side} x {side} results, depth {depth}"] = _dense(side, side, depth, dtype, device)
    if device == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        side, depths = EIGHT_BITS
        for depth in depths:
            work = Work(2 * side * side * depth, 1, partial(_eight_bits, side, side, depth))
            found[f"8-bit product of {side} x {side} results, depth {depth}"] = work
    for groups, rows, wide, out in GROUPS[device]:
        flops, kind = 2 * groups * rows * wide * out, f"{name}, {groups} groups of {rows} rows, {wide} to {out}"
        shape = (groups, rows, wide, out, dtype, device)
        found[f"grouped product in {kind}"] = Work(flops, 1, partial(_grouped, *shape))
        found[f"grouped gradient of weights in {kind}"] = Work(flops, 1, partial(_grouped_weights, *shape))
    return found


def _dense(rows: int, out: int, depth: int, dtype: torch.dtype, device: str) -> Work:
    return Work(2 * rows * out * depth, 1, partial(_multiply, rows, out, depth, dtype, device))


def _multiply(rows: int, out: int, depth: int, dtype: torch.dtype, device: str) -> Callable[[], object]:
    a, b = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((rows, depth), (depth, out)))
    return lambda: torch.mm(a, b)


def _eight_bits(rows: int, out: int, depth: int) -> Callable[[], object]:
    a, b = (torch.randn(size, depth, device="cuda").to(torch.float8_e4m3fn) for size in (rows, out))
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _grouped(groups: int, rows: int, wide: int, out: int, dtype: torch.dtype, device: str) -> Callable[[], object]:
    x, weights = (
        torch.randn(*shape, device=device, dtype=dtype) for shape in ((groups * rows, wide), (groups, out, wide))
    )
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * rows
    return lambda: grouped_product(x, weights, ends, True)


def _grouped_weights(
    groups: int, rows: int, wide: int, out: int, dtype: torch.dtype, device: str
) -> Callable[[], object]:
    x, grad_y = (torch.randn(groups * rows, width, device=device, dtype=dtype) for width in (wide, out))
    total = torch.zeros(groups, out, wide, device=device)
    stale = torch.zeros((), dtype=torch.bool)
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * rows
    return lambda: add_grouped_product(total, stale, grad_y, x, ends)


# Memory and launches.


def copy_within(device: str) -> Callable[[], object]:
    """A copy within memory."""
    source, target = (torch.ones(COPIED[device] // 4, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def beside_products(dtype: torch.dtype, device: str) -> dict[str, tuple[int, Callable[[], object]]]:
    """Compiled kernels as blocks have them between products: bytes read and written, and a call.

    A norm of a sum reads two tensors of rows and writes two; the gradient of an activation reads two and writes one.
    """
    (rows, width), wide = WIDTHS[device], 4 * WIDTHS[device][1]
    x, residual = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    weight = torch.randn(width, device=device, dtype=dtype)
    hidden, grad = (torch.randn(rows, wide, device=device, dtype=dtype) for _ in range(2))

    def norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total, torch.nn.functional.layer_norm(total, weight.shape, weight)

    def activation(grad: Tensor, hidden: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward(grad, hidden)

    if device == "cuda":
        norm, activation = torch.compile(norm), torch.compile(activation)
    return {
        "norm of a sum, read and written": (4 * x.nbytes, lambda: norm(x, residual, weight)),
        "gradient of an activation, read and written": (3 * hidden.nbytes, lambda: activation(grad, hidden)),
    }


def cpu_links(device: str) -> dict[str, float]:
    """GB/s of copies between a GPU and the memory of the CPU, one direction at a time and both at once."""
    if device != "cuda":
        return {}
    far, near = torch.ones(2, BETWEEN // 4).pin_memory(), torch.ones(2, BETWEEN // 4, device="cuda")
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        current = torch.cuda.current_stream()
        for stream, (target, source) in zip(streams, ((near[0], far[0]), (far[1], near[1])), strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)

    calls = {
        "copy from the memory of the CPU": lambda: near[0].copy_(far[0], non_blocking=True),
        "copy to the memory of the CPU": lambda: far[1].copy_(near[1], non_blocking=True),
        "copies in both directions, each": both,
    }
    found = {}
    for name, call in calls.items():
        timed(call, WARMUP, device)
        found[f"{name}, GB/s"] = BETWEEN / median(timed(call, REPEATS, device)) / 1e9
    return found


def launches(device: str) -> dict[str, float]:
    """Microseconds of a kernel that does almost nothing: launched by the CPU, and in a CUDA graph."""
    number = torch.zeros((), device=device)

    def launched() -> None:
        for _ in range(LAUNCHED):
            number.add_(1)

    timed(launched, WARMUP, device)
    found = {"launch of a kernel, us": 1e6 * median(timed(launched, 5, device)) / LAUNCHED}
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launched()
        timed(graph.replay, WARMUP, device)
        found["kernel in a CUDA graph, us"] = 1e6 * median(timed(graph.replay, 5, device)) / LAUNCHED
    return found
