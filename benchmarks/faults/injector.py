"""The extension that brings faults about in a run of `benchmarks/faults/injected.py`, one after another.

The file `faults.json` in the working directory lists them. A fault strikes its rank when its step begins for the first
time; the file `struck/NUMBER` then holds the process id and the time. So a step that is repeated is not struck again.
"""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mplug import hookimpl

DAY, HOUR = 86_400.0, 3_600.0
SLOW_SECONDS, SLOW_STEPS = 0.03, 8
"""Seconds by which each unit of a slow rank is slower, and the number of steps for which it is."""
CLOCK_SECONDS, CLOCK_STEPS = 0.7, 6
"""Seconds by which all ranks begin steps later after a jump of a clock, which takes seconds to be named."""
CUT_SECONDS = 2.0
"""Seconds in which the cable is pulled."""


class Injector:
    """Kills, stops or slows its process, changes a value, fills the disk, or moves the clock."""

    class Config(BaseModel):
        """No settings."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.faults: list[dict[str, Any]] = json.loads(Path("faults.json").read_text())
        self.armed: dict[str, Any] = {}
        self.is_slow, self.model = False, None

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> None:
        """Put the faults of computation around the units of the rank."""
        self.model = model
        for unit in model.own_units:
            part = model.module.get_submodule(unit.name)
            setattr(part, unit.method, partial(self._unit, getattr(part, unit.method)))

    @hookimpl
    def run_started(self, run: Any) -> None:
        """Change gradients before any other listener of the sinks."""
        for sink in self.model.sinks.values():
            sink.listeners.insert(0, self._gradient)

    @hookimpl
    def activity_began(self, run: Any) -> None:
        """Strike between two steps, before other observers look."""
        if run.activity.name != "step":
            return
        if any(one["kind"] == "clock" and 0 < run.step - one["at"] <= CLOCK_STEPS for one in self.faults):
            time.sleep(CLOCK_SECONDS)
        own = [fault for fault in self.faults if fault["rank"] == run.rank]
        self.is_slow = any(one["kind"] == "slow" and 0 <= run.step - one["at"] < SLOW_STEPS for one in own)
        for fault in own:
            if fault["at"] == run.step and _is_first(fault["number"]):
                self._strike(fault)

    def _strike(self, fault: dict[str, Any]) -> None:
        kind, seed = fault["kind"], fault["seed"]
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "cut":
            time.sleep(CUT_SECONDS)
        elif kind == "clock":
            real, jump = time.time, DAY if seed % 2 else -HOUR
            time.time = lambda: real() + jump
        elif kind == "weight":
            self._flip_weight(seed)
        elif kind == "disk":
            _fill(Path("runs"))
        elif kind in ("nan", "gradient"):
            self.armed[kind] = seed

    def _flip_weight(self, seed: int) -> None:
        """Flip a bit of the mantissa of an element of a weight that ranks hold as a copy."""
        import torch

        weights = [one.data for one in self.model.parameters().values() if one.dim() == 1]
        values = weights[seed % len(weights)].view(torch.int32).view(-1)
        values[seed % len(values)] ^= 1 << seed % 23

    def _unit(self, run: Any, *inputs: Any, **optional: Any) -> Any:
        if self.is_slow:
            time.sleep(SLOW_SECONDS)
        outputs = run(*inputs, **optional)
        if self.armed.pop("nan", None) is not None:
            first = outputs[0] if isinstance(outputs, tuple) else outputs
            first = first * float("nan")
            return (first, *outputs[1:]) if isinstance(outputs, tuple) else first
        return outputs

    def _gradient(self, sink: Any) -> None:
        """Set the highest bit of the exponent of an element, which then overflows."""
        import torch

        seed = self.armed.get("gradient")
        if seed is not None:
            sizes = sink.buffer.view(-1).abs()
            places = ((sizes > 1e-9) & (sizes < 2)).nonzero().view(-1)
            if len(places):  # otherwise the next sink
                sink.buffer.view(torch.int32).view(-1)[places[seed % len(places)]] ^= 1 << 30
                del self.armed["gradient"]


def _is_first(number: int) -> bool:
    """Whether the fault has not struck yet; it counts as struck from now on."""
    path = Path("struck", str(number))
    if path.exists():
        return False
    partial_file = path.with_suffix(".partial")
    partial_file.write_text(f"{os.getpid()} {time.monotonic()}")
    partial_file.rename(path)
    return True


def _fill(folder: Path) -> None:
    """Write a file until the file system has no space left."""
    descriptor = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (1 << 16, 1 << 10, 1):
        while True:
            try:
                os.write(descriptor, bytes(size))
            except OSError:
                break
    os.close(descriptor)
