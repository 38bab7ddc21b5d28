"""The times of a step of a rank, by kind of work, measured without making the CPU wait for the device.

- `compute`: the forward passes of this rank's units, without the collectives in them; on a GPU by events of the device.
- `communication`: the collectives in these forward passes, with the wait for slower ranks.
- `host`: the time of the CPU before the first unit, without that of the loader; 0 in later stages of a pipeline, which
  wait for the first one. On a GPU, the time in which the CPU launches the forward passes is added.

The collectives are those inside `mplug_ops.waiting`. The passes of backward take about twice the time of these, on
every rank.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mplug import Model, Run
from mplug_ops import listening


@dataclass
class Measurement:
    """The marks of a step: pairs of CUDA events, or of seconds on the CPU."""

    began: float
    first_unit: float | None = None
    launching: float = 0.0
    units: list[tuple[Any, Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)


class WorkClock:
    """Measures steps between `start` and `stop`; `read` returns their times when the device has completed them."""

    def __init__(self, run: Run, model: Model) -> None:
        self._is_gpu = run.device.startswith("cuda")
        self._measured: dict[int, Measurement] = {}
        self._current: Measurement | None = None
        self._listening: Any = None
        self._is_inside = False
        self._begins = model.own_units[:1] == model.plan.units[:1]
        """Whether this rank computes the first unit of the model; others wait for activations before theirs."""
        for unit in model.own_units:
            part = model.module.get_submodule(unit.name)
            setattr(part, unit.method, partial(self._timed, getattr(part, unit.method)))

    def start(self, step: int) -> None:
        """Measure this step."""
        self._current = self._measured[step] = Measurement(time.perf_counter())
        self._listening = listening(self._wait)
        self._listening.__enter__()

    def stop(self) -> None:
        """The step is launched."""
        if self._current is not None:
            self._current = None
            self._listening.__exit__(None, None, None)

    def read(self, step: int, data_wait: float) -> dict[str, float] | None:
        """Seconds by kind of work, if the step was measured. Call it when the device has completed the step.

        `data_wait` are the seconds in which the CPU waited for the loader.
        """
        found = self._measured.pop(step, None)
        if found is None:
            return None
        if found is self._current:
            self.stop()
        inside, units = (sum(self._seconds(*pair) for pair in pairs) for pairs in (found.waits, found.units))
        before = found.first_unit - found.began - data_wait if self._begins and found.first_unit is not None else 0.0
        host = max(before, 0.0) + (found.launching if self._is_gpu else 0.0)
        return {"compute": max(units - inside, 0.0), "communication": inside, "data": data_wait, "host": host}

    def _timed(self, run: Callable[..., Any], *inputs: Any, **optional: Any) -> Any:
        """A unit's forward pass, with marks around it in a measured step."""
        measurement = self._current
        if measurement is None or not torch.is_grad_enabled():
            return run(*inputs, **optional)
        began, first, self._is_inside = time.perf_counter(), self._mark(), True
        measurement.first_unit = measurement.first_unit or began
        try:
            outputs = run(*inputs, **optional)
        finally:
            self._is_inside = False
        measurement.units.append((first, self._mark()))
        measurement.launching += time.perf_counter() - began
        return outputs

    def _wait(self) -> Callable[[], None]:
        """A collective of the operators begins; those of backward are not measured."""
        measurement = self._current
        if measurement is None or not self._is_inside:
            return _ignore
        first = self._mark()
        return lambda: measurement.waits.append((first, self._mark()))

    def _mark(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1e3 if self._is_gpu else last - first


def _ignore() -> None:
    """The end of a collective that is not measured."""
