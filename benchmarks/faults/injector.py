"""The extension that brings a fault about in a run of `benchmarks/faults/injected.py`, on one rank and at one step."""

import os
import signal
import time
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mplug import hookimpl

DAY = 86_400.0


class Injector:
    """Kills, stops or slows its process, or changes a value, when step `at` begins."""

    class Config(BaseModel):
        """The fault."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        kind: str = Field(description="what happens")
        rank: int = Field(description="the rank that it happens to")
        at: int = Field(description="the step at whose begin it happens")
        seed: int = Field(0, description="decides which tensor, element and bit")

    def __init__(self, config: Config) -> None:
        self.config, self.is_armed, self.is_slow, self.model = config, False, False, None

    @hookimpl
    def wrap_model(self, run: Any, model: Any) -> None:
        """Put the faults of computation around the units and sinks of the rank."""
        self.model = model
        if run.rank != self.config.rank:
            return
        for unit in model.own_units:
            part = model.module.get_submodule(unit.name)
            setattr(part, unit.method, partial(self._unit, getattr(part, unit.method)))

    @hookimpl
    def run_started(self, run: Any) -> None:
        """Change gradients before any other listener of the sinks."""
        if run.rank == self.config.rank and self.config.kind == "gradient":
            for sink in self.model.sinks.values():
                sink.listeners.insert(0, self._gradient)

    @hookimpl
    def activity_began(self, run: Any) -> None:
        """Strike between two steps, before other observers look."""
        own = self.config
        if run.rank != own.rank or run.activity.name != "step" or run.step != own.at:
            return
        with open("struck.partial", "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {time.monotonic()}")
        os.rename("struck.partial", "struck")
        if own.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif own.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif own.kind == "cut":
            time.sleep(2)  # the cable is pulled meanwhile
        elif own.kind == "clock":
            real = time.time
            time.time = lambda: real() + DAY
        elif own.kind == "weight":
            self._flip_weight()
        elif own.kind == "slow":
            self.is_slow = True
        else:
            self.is_armed = True

    def _flip_weight(self) -> None:
        import torch

        weights = [one.data for one in self.model.parameters().values() if one.dim() == 1]
        values = weights[self.config.seed % len(weights)].view(torch.int32).view(-1)
        values[self.config.seed % len(values)] ^= 1 << self.config.seed % 23  # a bit of the mantissa

    def _unit(self, run: Any, *inputs: Any, **optional: Any) -> Any:
        if self.is_slow:
            time.sleep(0.05)
        outputs = run(*inputs, **optional)
        if self.is_armed and self.config.kind == "nan":
            self.is_armed = False
            first = outputs[0] if isinstance(outputs, tuple) else outputs
            first = first * float("nan")
            return (first, *outputs[1:]) if isinstance(outputs, tuple) else first
        return outputs

    def _gradient(self, sink: Any) -> None:
        import torch

        if self.is_armed and self.config.kind == "gradient":
            self.is_armed = False
            values = sink.buffer.view(torch.int32).view(-1)
            values[self.config.seed % len(values)] ^= 1 << 30  # the highest bit of the exponent
