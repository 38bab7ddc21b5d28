"""What the machine is and can do, for reports."""

import resource
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import torch

PEAK_TFLOPS = {"H100": 989.4, "H200": 989.4, "H800": 989.4, "A100": 312.0, "B200": 2250.0}
"""Dense bf16 peak of a chip in TFLOP/s, by a word of its name (vendors' data sheets)."""


def peak_tflops(device: str) -> float | None:
    """The dense bf16 peak that MFU is a fraction of; None where the chip is not known."""
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_TFLOPS.items() if word in name), None)


def peak_memory_gib(device: str) -> float:
    """The most memory that this process has held: of the GPU, or resident in RAM."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Moment:
    """The moment at which a device is done with all that was launched so far, by the device's own clock."""

    def __init__(self, device: str) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.startswith("cuda") else None
        if self._event is not None:
            self._event.record()
        self._seconds = time.perf_counter()

    @property
    def passed(self) -> bool:
        """Whether waiting for it waits for nothing, on any rank: a CPU is done when the host is."""
        return self._event is None

    def wait(self) -> None:
        """Wait for it, and for nothing that was launched later."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: "Moment") -> float:
        """Seconds from another moment to this one; both must have been waited for."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def timed(work: Callable[[], object], repeats: int, device: str) -> list[float]:
    """Seconds of each of some calls in a row, by the device's own clock; it is waited for once, after the last."""
    moments = [Moment(device)]
    for _ in range(repeats):
        work()
        moments.append(Moment(device))
    moments[-1].wait()
    return [after.since(before) for before, after in pairwise(moments)]
