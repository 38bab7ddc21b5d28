"""Attention with windows, soft caps and attention sinks: how exact and how fast each kernel is, by sequence length.

    python benchmarks/windows.py [--only triton flex] [--shapes gemma-2-27b gpt-oss] [--lengths 4096 131072] [--calls 5]

Shapes are those of one layer: `local` with its window, `global` without. Speed is that of a batch of one sequence, in
TFLOP/s forward, and forward and backward together. FLOPs are those of the pairs that a query sees, counted once:
4 H K pairs forward, and 2.5 times that backward. Errors are ‖found - exact‖ / ‖exact‖ in bf16 against the plain
composition in fp64 at 1,024 tokens: the largest of the output and of all gradients; `plain` is the composition in bf16.
`flash-attn-4 itself` calls the library with its own window, soft cap and sinks, which `kernels/flash` does not offer.
Without a GPU, lengths are small and times say nothing. Exit status 1 if an error is above 1e-2 and twice the plain one.
"""

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mplug.training.hardware import Moment
from mplug_nn import AttentionInputs, AttentionSpec
from mplug_nn.attention import scaled_dot_product
from mplug_nn.specification import SINKS, SOFT_CAP, WINDOW

SHAPES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "gemma-2-27b local": (32, 16, 128, {"window": 4096, "soft_cap": 50.0}),
    "gemma-2-27b global": (32, 16, 128, {"soft_cap": 50.0}),
    "gemma-2-9b local": (16, 8, 256, {"window": 4096, "soft_cap": 50.0}),
    "gemma-3-27b local": (32, 16, 128, {"window": 1024}),
    "gpt-oss local": (64, 8, 64, {"window": 128, "sinks": True}),
    "gpt-oss global": (64, 8, 64, {"sinks": True}),
    "llama-3-8b": (32, 8, 128, {}),
}
"""Query heads, KV heads, width of a head, and the specification."""
EXACT = 1024
BAND = 1e-2
Core = Callable[..., Tensor]


def triton_core() -> Core:
    """Of kernels/triton."""
    from mplug_triton.attention import attention

    return attention


def flex_core() -> Core:
    """Of kernels/flex."""
    from mplug_flex.attention import attention

    return attention


def flash_core() -> Core:
    """Of kernels/flash, version 4; it has neither windows nor soft caps nor sinks."""
    import flash_attn.cute.interface  # noqa: F401 (fails early where it is missing)
    from mplug_flash.attention import core

    plain = core(4, False)
    return lambda q, k, v, spec, inputs: plain(q, k, v, _without(spec, {WINDOW, SOFT_CAP, SINKS}), inputs)


def library_core() -> Core:
    """flash-attn-4 with its own window, soft cap and sinks."""
    from flash_attn.cute.interface import flash_attn_func

    def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        before = None if spec.window is None else spec.window - 1
        named = {"window_size": (before, 0 if before is not None else None), "softcap": spec.soft_cap or 0.0}
        given = {"learnable_sink": inputs.sinks, "softmax_scale": spec.scale, "causal": spec.causal}
        found = flash_attn_func(q, k, v, **given, **named)
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output

    return attention


def sdpa_core() -> Core:
    """Of kernels/sdpa: cuDNN's on a GPU; it has neither windows nor soft caps nor sinks."""
    from mplug_sdpa.attention import CORES

    plain = CORES["cudnn" if torch.cuda.is_available() else "torch"]
    return lambda q, k, v, spec, inputs: plain(q, k, v, _without(spec, {WINDOW, SOFT_CAP, SINKS}), inputs)


CORES: dict[str, tuple[Callable[[], Core], bool]] = {
    "triton": (triton_core, True),
    "flex": (flex_core, True),
    "flash-attn-4 itself": (library_core, True),
    "flash": (flash_core, False),
    "sdpa": (sdpa_core, False),
}
"""Name -> the core, and whether it serves windows, soft caps and sinks."""


def _without(spec: AttentionSpec, refused: set[str]) -> AttentionSpec:
    if spec.needs & refused:
        raise ValueError(f"not served: {', '.join(sorted(spec.needs & refused))}")
    return spec


def pairs(spec: AttentionSpec, length: int) -> int:
    """Pairs of a query and a key that it sees, in a causal sequence."""
    window = min(spec.window or length, length)
    return window * (window + 1) // 2 + (length - window) * window


def leaves_of(shape: tuple[int, int, int, Any], spec: AttentionSpec, length: int, device: str) -> list[Tensor]:
    """q [1, S, H, K], k and v [1, S, G, K], and sinks [H] if there are any, in bf16; then the output's gradient."""
    heads, groups, width, _ = shape
    generator = torch.Generator(device).manual_seed(1)
    sizes: list[tuple[int, ...]] = [(1, length, heads, width), *[(1, length, groups, width)] * 2]
    sizes += [(heads,)] if spec.sinks else []
    sizes += [(1, length, heads, width)]
    return [torch.randn(size, device=device, generator=generator, dtype=torch.bfloat16) for size in sizes]


def gradients(core: Core, spec: AttentionSpec, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and all gradients."""
    *leaves, grad = (x.to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    output = core(*leaves[:3], spec, AttentionInputs(sinks=leaves[3] if spec.sinks else None))
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def error(core: Core, shape: tuple[int, int, int, Any], spec: AttentionSpec, device: str) -> tuple[float, float]:
    """The largest error of a core, and that of the plain composition in bf16."""
    spec = replace(spec, window=spec.window and min(spec.window, 300))  # so that it hides keys at this length
    tensors = leaves_of((8, 8 * shape[1] // shape[0] or 1, *shape[2:]), spec, EXACT, device)
    exact = gradients(scaled_dot_product, spec, tensors, torch.float64)
    found = []
    for one in (core, scaled_dot_product):
        both = zip(gradients(one, spec, tensors, torch.bfloat16), exact, strict=True)
        found.append(max(float((x.double() - y).norm() / y.norm()) for x, y in both))
    return found[0], found[1]


def seconds(call: Callable[[], object], device: str, calls: int) -> float:
    """The median time of a call."""
    for _ in range(2):
        call()
    moments = [Moment(device)]
    for _ in range(calls):
        call()
        moments.append(Moment(device))
    moments[-1].wait()
    return statistics.median(after.since(before) for before, after in pairwise(moments))


def speeds(
    core: Core, shape: tuple[int, int, int, Any], spec: AttentionSpec, length: int, device: str, calls: int
) -> str:
    """TFLOP/s forward / forward and backward."""
    tensors = leaves_of(shape, spec, length, device)
    flops = 4 * shape[0] * shape[2] * pairs(spec, length)
    with torch.no_grad():
        sinks = tensors[3] if spec.sinks else None
        forward = seconds(lambda: core(*tensors[:3], spec, AttentionInputs(sinks=sinks)), device, calls)
    both = seconds(lambda: gradients(core, spec, tensors, torch.bfloat16), device, calls)
    return f"{flops / forward / 1e12:.0f} / {3.5 * flops / both / 1e12:.0f}"


def main() -> int:
    """Print a row for every shape and kernel, with a column for each length."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(CORES), help="names of kernels, or their beginnings")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help="names of shapes, or their beginnings")
    parser.add_argument("--lengths", nargs="*", type=int, default=None)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--without-errors", action="store_true", help="measure times alone")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # those of torch's compiler
    device, failed = "cuda" if torch.cuda.is_available() else "cpu", False
    lengths = options.lengths or ([4096, 16384, 65536, 131072] if device == "cuda" else [128])
    print(f"{'shape':<20}{'kernel':<21}{'error':>8}{'plain':>8}" + "".join(f"{length:>14,}" for length in lengths))
    for name, shape in SHAPES.items():
        if not name.startswith(tuple(options.shapes)):
            continue
        spec = AttentionSpec(shape[2] ** -0.5, shape[2], shape[2], **shape[3])
        for kernel, (make, serves) in CORES.items():
            if not kernel.startswith(tuple(options.only)) or (spec.needs and not serves):
                continue
            cells = ["-", "-"]
            try:
                core = make()
                if not options.without_errors:
                    off, plain = error(core, shape, spec, device)
                    cells, failed = [f"{off:.1e}", f"{plain:.1e}"], failed or not off <= max(BAND, 2 * plain)
                cells += [speeds(core, shape, spec, length, device, options.calls) for length in lengths]
            except (ImportError, RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError) as reason:
                cells.append(f"  {type(reason).__name__}: {str(reason)[:90]!r}")
            print(
                f"{name:<20}{kernel:<21}{cells[0]:>8}{cells[1]:>8}" + "".join(f"{cell:>14}" for cell in cells[2:]),
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
