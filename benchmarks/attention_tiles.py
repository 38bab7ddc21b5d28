"""The tiles of kernels/triton's attention: the time of each pass with other tiles than those of its table.

    python benchmarks/attention_tiles.py [--shapes "d128 window"] [--calls 5]

Each shape is one layer of a published model: heads of 64, 128 or 256, with a window or without. A row has one other
tile: queries, keys, warps of a program, loads in flight. The two passes of backward are launched together, so their
rows differ in one of the two. Put the fastest tiles of each pass into `mplug_triton.attention_launch.HALF`.
"""

import argparse
import itertools
import statistics

import torch
from mplug_triton import attention_launch as launch
from mplug_triton.attention_launch import Scoring, Tiles
from mplug_triton.sight import Mask, sight_of

from mplug.training.hardware import Moment

SHAPES: dict[str, tuple[int, int, int, int, int | None, float | None]] = {
    "d128 window": (32, 16, 128, 16384, 4096, 50.0),
    "d128 causal": (32, 8, 128, 16384, None, None),
    "d64 window": (64, 8, 64, 32768, 128, None),
    "d64 causal": (64, 8, 64, 16384, None, None),
    "d256 window": (16, 8, 256, 16384, 4096, 50.0),
}
"""Query heads, KV heads, width, tokens, window, soft cap."""
Candidates = dict[int, list[tuple[int, int, int, int]]]
FORWARD: Candidates = {
    64: [(128, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3)],
    128: [(128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3)],
    256: [(128, 32, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3)],
}
DQ: Candidates = {
    64: [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2)],
    128: [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)],
    256: [(64, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 2), (128, 32, 8, 1)],
}
DK_DV: Candidates = {
    64: [(64, 128, 8, 3), (64, 128, 8, 1), (64, 64, 4, 2), (32, 128, 4, 3), (64, 128, 4, 2)],
    128: [(64, 128, 8, 2), (32, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2), (64, 128, 8, 1)],
    256: [(32, 64, 8, 2), (64, 64, 8, 1), (32, 64, 4, 1), (16, 64, 4, 2)],
}


def milliseconds(call: object, calls: int) -> float:
    """The median time of a call on the GPU."""
    assert callable(call)
    call()
    moments = [Moment("cuda")]
    for _ in range(calls):
        call()
        moments.append(Moment("cuda"))
    moments[-1].wait()
    return statistics.median(after.since(before) for before, after in itertools.pairwise(moments)) * 1e3


def measure(name: str, calls: int) -> None:
    """Print a row for each candidate of each pass."""
    heads, groups, width, length, window, cap = SHAPES[name]
    sizes = [(1, length, n, width) for n in (heads, groups, groups, heads)]
    q, k, v, grad = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    sight, scoring = sight_of(Mask(True, window), length, length, q.device), Scoring(width**-0.5, cap)
    seen = min(window or length, length)
    flops = 4 * heads * width * (seen * (seen + 1) // 2 + (length - seen) * seen)
    plan = launch.HALF[width]
    output, sums = launch.forward((q, k, v), None, sight, scoring, plan)
    given = ((q, k, v), grad, launch.row_sums(output, grad), sums, sight, scoring)
    passes = (("forward", FORWARD, 1.0), ("dq", DQ, 2.5), ("dk_dv", DK_DV, 2.5))
    for which, candidates, factor in passes:
        for tiles in candidates[width]:
            other = plan._replace(**{which: Tiles(*tiles)})
            try:
                if which == "forward":
                    spent = milliseconds(lambda p=other: launch.forward((q, k, v), None, sight, scoring, p), calls)
                else:
                    spent = milliseconds(lambda p=other: launch.backward(*given, p), calls)
            except Exception as reason:  # such as tiles that do not fit into shared memory
                print(f"{name:<13}{which:<9}{tiles!s:<20}{type(reason).__name__}", flush=True)
                continue
            print(
                f"{name:<13}{which:<9}{tiles!s:<20}{spent:9.3f} ms{factor * flops / spent / 1e9:8.0f} TFLOP/s",
                flush=True,
            )


def main() -> None:
    """Measure every shape, or those that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--calls", type=int, default=5)
    options = parser.parse_args()
    for name in options.shapes:
        measure(name, options.calls)


if __name__ == "__main__":
    main()
