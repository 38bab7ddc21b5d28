"""The clock and the power of a GPU while work runs on it, as NVML reports them.

A GPU that reaches its power limit lowers the clock of all its multiprocessors. So a rate holds at the clock at which it
was measured, and a step in which other work runs too has another clock.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

SM = 1
"""NVML_CLOCK_SM, of the multiprocessors (nvml.h)."""


@dataclass(frozen=True)
class Reading:
    """The clock in MHz, and the power in watts, during some work."""

    mhz: float
    watts: float


class Clocks:
    """Reads one GPU. `facts` has its limits; it is empty if NVML cannot be used, and then `during` reads nothing."""

    def __init__(self, device: str) -> None:
        self._library = self._handle = None
        self.facts: dict[str, float] = {}
        if device == "cuda":
            with suppress(OSError, AttributeError):  # no driver library, or an older one: there is no reading
                self._open()

    def _open(self) -> None:
        library, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return
        self._library, self._handle = library, handle
        found = {
            "power limit, W": (self._number("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
            "largest clock, MHz": (self._number("nvmlDeviceGetMaxClockInfo", SM), 1.0),
        }
        self.facts = {name: factor * value for name, (value, factor) in found.items() if value is not None}

    def _number(self, function: str, *arguments: int) -> float | None:
        """The unsigned number that a function of NVML returns for the GPU; None if it returns an error."""
        assert self._library is not None
        value = ctypes.c_ulonglong(0)  # wide enough for the 32 bits of some functions (little-endian)
        failed = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        return None if failed else float(value.value)

    def during(self, work: Callable[[], object], seconds: float) -> Reading | None:
        """Repeat `work`, which waits for the GPU itself, for at least `seconds`; the reading of the second half."""
        mhz, joules, began = list[float](), list[tuple[float, float]](), perf_counter()
        while perf_counter() - began < seconds:
            work()
            if self._library is None:
                continue
            clock, energy = (
                self._number("nvmlDeviceGetClockInfo", SM),
                self._number("nvmlDeviceGetTotalEnergyConsumption"),
            )
            if clock is not None and energy is not None:
                mhz.append(clock)
                joules.append((perf_counter(), energy * 1e-3))
        half = len(joules) // 2
        if len(joules) < 4 or joules[-1][0] == joules[half][0]:
            return None
        return Reading(median(mhz[half:]), (joules[-1][1] - joules[half][1]) / (joules[-1][0] - joules[half][0]))
