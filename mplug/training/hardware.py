"""Properties of the machine (peak FLOP/s, memory) and timing by the device's clock, for reports."""

import resource
import sys
import time

import torch

PEAK_TFLOPS = {"H100": 989.4, "H200": 989.4, "H800": 989.4, "A100": 312.0, "B200": 2250.0}
"""Dense bf16 peak of a chip in TFLOP/s, by a word in its name (vendors' data sheets)."""


def peak_tflops(device: str) -> float | None:
    """The dense bf16 peak in TFLOP/s, to which MFU refers; None if the chip is unknown."""
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_TFLOPS.items() if word in name), None)


def peak_memory_gib(device: str) -> float:
    """The peak memory of this process: allocated on the GPU, or resident in RAM."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Moment:
    """The moment when the device has finished everything that was launched before, by the device's own clock."""

    def __init__(self, device: str) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.startswith("cuda") else None
        if self._event is not None:
            self._event.record()
        self._seconds = time.perf_counter()

    @property
    def passed(self) -> bool:
        """Whether `wait` returns at once on every rank: true on a CPU, where calls are synchronous."""
        return self._event is None

    def wait(self) -> None:
        """Wait for this moment, but not for work that was launched later."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: "Moment") -> float:
        """Seconds from an earlier moment to this one; both must have passed."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return float(earlier._event.elapsed_time(self._event)) / 1e3
