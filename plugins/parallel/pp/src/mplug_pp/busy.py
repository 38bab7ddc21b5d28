"""Measures how long a rank computes within a step."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class Busy:
    """The times of the computations of a step: events on a GPU, seconds on a CPU."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._spans: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within this context, the rank computes."""
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def measured(self) -> Callable[[], Mapping[str, float]]:
        """A function that returns the step's bubble after the device has completed the step; ends the step."""
        spans, self._spans = self._spans, []

        def bubble() -> Mapping[str, float]:
            busy = sum(self._between(*span) for span in spans)
            return {"bubble": 1 - busy / self._between(spans[0][0], spans[-1][1])}

        return bubble

    def _between(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) if self._on_gpu else stop - start  # type: ignore[no-any-return]
