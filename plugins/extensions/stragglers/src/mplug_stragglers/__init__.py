"""Stragglers: ranks that are slower than the others, by kind of work."""

import logging
import sys
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt

from mplug import UsageError, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mplug import Model, Record, Run, RunConfig
    from mplug_stragglers.clock import WorkClock

log = logging.getLogger("mplug")


class Stragglers:
    """Names ranks that are slower than the others, their machines, and the kind of work in which they are slower.

    In every n-th step, each rank measures its own computation, its waits for data and for other ranks, and the work of
    its CPU. All ranks compare these times.
    """

    class Config(BaseModel):
        """How often to measure, and which ranks to name."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        every: PositiveInt = Field(50, description="measure each step whose number is a multiple of this one")
        below: FiniteFloat = Field(
            0.75,
            gt=0,
            lt=1,
            description="name a rank whose score is below this: the median time of all ranks, divided by its own time",
        )
        window: PositiveInt = Field(
            3,
            description="number of last measurements whose smallest time counts, so that a single pause names no rank",
        )

    def __init__(self, config: Config) -> None:
        self.config = config
        self.clock: WorkClock | None = None
        self._times: list[dict[str, float]] = []
        self._named: tuple[str, ...] = ()
        self._has_run = False

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse steps that are replayed as a whole: no clock runs in them."""
        if config.trainer.graphs:
            raise UsageError(
                "extensions.stragglers measures the units of a model, and trainer.graphs replays a step as a whole; "
                "set trainer.graphs=false, or extensions.stragglers=false"
            )

    @hookimpl
    def training_built(self, run: "Run", model: "Model") -> None:
        """Put a clock around the units of this rank; it runs in measured steps only."""
        from mplug_stragglers.clock import WorkClock

        self.clock = WorkClock(run, model)

    @hookimpl
    def step_started(self, run: "Run") -> None:
        """Start the clock, if this step is measured; the first step of a process compiles, so it is not."""
        if self.clock is not None:
            self.clock.stop()
            has_run, self._has_run = self._has_run, True
            if run.step % self.config.every == 0 and has_run:
                self.clock.start(run.step)

    @hookimpl
    def step_figures(self, run: "Run", record: "Record") -> "Mapping[str, float] | None":
        """`straggler_score`, the lowest score of all ranks and kinds of work, and `slowest_rank`. Collective.

        On a GPU, the host calls it while the next step runs, and the events of the measured step have passed.
        """
        times = self.clock.read(record["step"], record["data_wait_s"]) if self.clock is not None else None
        return None if times is None else self._compared(run, record["step"], {**times, "step": record["step_s"]})

    def _compared(self, run: "Run", step: int, times: dict[str, float]) -> dict[str, float]:
        import socket

        from mplug_stragglers.scores import lowest, scores, sentences

        self._times = [*self._times, times][-self.config.window :]
        usual = {kind: min(one[kind] for one in self._times) for kind in times}
        found = run.gathered((socket.gethostname(), usual))
        hosts, of_ranks = [host for host, _ in found], [times for _, times in found]
        by_rank = scores(of_ranks)
        rank, score = lowest(by_rank)
        if len(self._times) == self.config.window:
            self._report(run, step, sentences(by_rank, of_ranks, hosts, self.config.below))
        return {"straggler_score": score, "slowest_rank": float(rank)}

    def _report(self, run: "Run", step: int, lines: list[str]) -> None:
        """Log and print sentences, but not again while the same ranks are slow in the same work."""
        named = tuple(sorted(line.partition(" for ")[0] for line in lines))
        if lines and named != self._named:
            log.warning("step %d: %s", step, "; ".join(lines))
            if run.rank == 0:
                print(f"mplug: step {step}: {'; '.join(lines)}", file=sys.stderr, flush=True)
        self._named = named

    @hookimpl
    def run_finished(self) -> None:
        """Stop the clock."""
        self._stop()

    @hookimpl
    def run_failed(self) -> None:
        """Stop the clock."""
        self._stop()

    def _stop(self) -> None:
        if self.clock is not None:
            self.clock.stop()
