"""What the machine itself can do, so that a result is a fraction of its limit."""

from itertools import pairwise

import torch

from mplug.hardware import Moment

REPEATS = 20


def ceilings(device: str) -> dict[str, float]:
    """Measured rates: a large matrix product in TFLOP/s, a copy within memory in TB/s (read and written)."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = _best(lambda: torch.mm(a, b), device)
    elements = 2**30 if device == "cuda" else 2**24
    source, target = (torch.ones(elements // 4, device=device) for _ in range(2))
    copy = _best(lambda: target.copy_(source), device)
    kind = str(dtype).removeprefix("torch.")
    return {
        f"{kind} product of {size} x {size} matrices, TFLOP/s": 2 * size**3 / product / 1e12,
        "copy within memory, TB/s": 2 * source.nbytes / copy / 1e12,
    }


def _best(work: object, device: str) -> float:
    """Seconds of the fastest of some calls."""
    assert callable(work)
    moments = [Moment(device)]
    for _ in range(REPEATS):
        work()
        moments.append(Moment(device))
    moments[-1].wait()
    return min(after.since(before) for before, after in pairwise(moments))
