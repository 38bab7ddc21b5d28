"""Python's garbage collection at the same step on every rank."""

import gc
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mplug import Record, Run


class GarbageCollection:
    """Turns Python's automatic garbage collection off during training, and collects every n-th step on all ranks.

    An automatic collection starts on each rank at a moment of its own, and the other ranks wait for this rank in their
    next collective. Collected together, ranks wait once.
    """

    class Config(BaseModel):
        """When to collect."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        every: PositiveInt = Field(100, description="collect before each step whose number is a multiple of this one")
        generation: int = Field(
            1,
            ge=0,
            le=2,
            description="oldest generation of objects to collect; 2 also visits objects that have survived earlier "
            "collections, which takes longer",
        )

    def __init__(self, config: Config) -> None:
        self.config = config
        self._was_enabled: bool | None = None
        self._seconds: dict[int, float] = {}
        """The seconds of the collections before steps that are not reported yet."""
        self.collections, self.objects, self.seconds = 0, 0, 0.0

    @hookimpl
    def run_started(self, run: "Run") -> None:
        """Collect once, because building leaves much garbage, and turn automatic collections off."""
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()

    @hookimpl
    def step_started(self, run: "Run") -> None:
        """Collect, if this is such a step."""
        if self._was_enabled is None or run.step % self.config.every:
            return
        start = time.perf_counter()
        self.objects += gc.collect(self.config.generation)
        seconds = time.perf_counter() - start
        self.collections, self.seconds = self.collections + 1, self.seconds + seconds
        self._seconds[run.step] = seconds

    @hookimpl
    def step_figures(self, record: "Record") -> "Mapping[str, float] | None":
        """`gc_s`, the seconds of this rank's collection before the step, if there was one."""
        seconds = self._seconds.pop(record["step"], None)
        return None if seconds is None else {"gc_s": seconds}

    @hookimpl
    def run_finished(self) -> None:
        """Restore Python's setting, and log what was collected."""
        self._restore()

    @hookimpl
    def run_failed(self) -> None:
        """Restore Python's setting, and log what was collected."""
        with suppress(OSError):  # the disk is full, which the host reports
            self._restore()

    def _restore(self) -> None:
        if self._was_enabled is None:
            return
        import logging

        if self._was_enabled:
            gc.enable()
        self._was_enabled = None
        logging.getLogger("mplug").info(
            "garbage collection: %d times, %d objects, %.3f s", self.collections, self.objects, self.seconds
        )
