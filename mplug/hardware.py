"""What the machine is and can do, for reports."""

import resource
import sys

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
