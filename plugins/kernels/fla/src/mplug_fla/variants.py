"""The variants of the library's kernels: how many of them are tried.

A kernel of the library has a list of variants (tiles, warps, depth of its pipeline). At the first call with a shape,
Triton compiles all of them, times them and keeps the fastest. This module shortens the lists in place.
"""

import sys
from collections.abc import Iterator
from math import log2
from typing import Any

OPERATIONS = ("gated_delta_rule", "kda", "gla", "simple_gla", "common", "utils")


FOLDERS = tuple(f"fla.{name}." for name in (*(f"ops.{one}" for one in OPERATIONS), "modules.causal_conv1d"))
"""The packages of the kernels that the plugin calls; in them, every kernel has a name of its own."""


def tuners() -> Iterator[tuple[str, Any]]:
    """(kernel, Triton's object that chooses among its variants) for each kernel that the plugin may call."""
    from triton.runtime.autotuner import Autotuner

    for name, module in sorted(sys.modules.items()):
        if name.startswith(FOLDERS):
            for found in list(vars(module).values()):
                tuner = _inside(found, Autotuner)
                if tuner is not None and tuner.base_fn.__module__ == name:
                    yield tuner.base_fn.__name__, tuner


def _inside(found: Any, kind: type) -> Any:
    """The object of `kind` in a chain of Triton's decorators, or None."""
    for _ in range(8):
        if isinstance(found, kind):
            return found
        found = getattr(found, "fn", None) if type(found).__module__.startswith(("triton.", "fla.")) else None
        if found is None:
            return None
    return None


def keep(count: int) -> None:
    """Keep at most `count` variants of each kernel, those of middle tiles and depths first: a shorter first step."""
    for _, tuner in tuners():
        left = sorted(tuner.configs, key=_distance)[:count]
        if len(left) != len(tuner.configs):
            tuner.configs = left
            tuner.cache.clear()


def _distance(variant: Any) -> tuple[float, ...]:
    """How far a variant is from the middle: 3 stages, tiles of 64, 4 warps."""
    tiles = [abs(log2(size) - 6) for name, size in variant.kwargs.items() if name.startswith("B")]
    return abs(variant.num_stages - 3), sum(tiles), abs(log2(variant.num_warps) - 2)
