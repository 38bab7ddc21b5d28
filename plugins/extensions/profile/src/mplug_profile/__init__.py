"""Profiles of a run's steps, and a snapshot of the GPU's memory when it is exhausted. Both are torch's own."""

import sys
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from mplug import UsageError, hookimpl

if TYPE_CHECKING:
    from mplug import Run, RunConfig
    from mplug_profile.memory import MemoryHistory
    from mplug_profile.trace import StepTrace

FOLDER = "profile"
"""The folder of all files, in the run's folder."""
SETTLED = 6
"""The first recorded step of a process, unless the config names one: earlier ones compile units and get memory."""


class Profile:
    """Records the steps of chosen ranks, and writes a snapshot of the memory of each rank that runs out of it."""

    class Config(BaseModel):
        """What to record, and where."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        steps: PositiveInt | None = Field(None, description="number of consecutive steps to record; null: none")
        first: PositiveInt | None = Field(
            None, description=f"first step to record; null: the {SETTLED}th step after each start of the run"
        )
        ranks: Literal["all"] | tuple[NonNegativeInt, ...] = Field(
            (0,), description="ranks to record: [0, 8], or 'all'"
        )
        stacks: bool = Field(False, description="record the lines of Python that call each operator; slows the steps")
        shapes: bool = Field(False, description="record the shapes of the operators' tensors; slows the steps")
        memory_snapshot: bool | None = Field(
            None,
            description="record allocations of GPU memory, and write a snapshot when it is exhausted; null: only if "
            "'steps' is null, because the recording takes time in each step",
        )
        memory_entries: PositiveInt = Field(100_000, description="number of last allocations that a snapshot shows")

        @model_validator(mode="after")
        def _check(self) -> "Profile.Config":
            if self.first is not None and self.steps is None:
                raise ValueError("'first' has no effect without 'steps', the number of steps to record")
            return self

    def __init__(self, config: Config) -> None:
        self.config = config
        self.trace: StepTrace | None = None
        self.memory: MemoryHistory | None = None
        self._seen = False

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a first step behind the end of the run."""
        own, steps = self.config, config.trainer.steps
        if own.first is not None and own.first > steps:
            raise UsageError(
                f"extensions.profile.first={own.first} is behind the last step (trainer.steps={steps}); use a smaller "
                f"number"
            )

    @hookimpl
    def activity_began(self, run: "Run") -> None:
        """End the recording of steps before the next activity: a step, an evaluation, a save.

        Record allocations from the first activity of the process on: the model gets its memory before it trains.
        """
        if self.trace is not None and self.trace.is_complete:
            self._end_trace()
        if self._seen or run.directory is None:
            return
        self._seen, own = True, self.config
        wanted = own.steps is None if own.memory_snapshot is None else own.memory_snapshot
        if wanted and run.device.startswith("cuda"):
            from mplug_profile.memory import MemoryHistory

            self.memory = MemoryHistory(own.memory_entries)

    @hookimpl
    def run_started(self, run: "Run") -> None:
        """Prepare the recording of the chosen steps."""
        own = self.config
        if own.steps is None or run.directory is None or (own.ranks != "all" and run.rank not in own.ranks):
            return
        first = run.step + SETTLED if own.first is None else own.first
        last = min(first + own.steps - 1, run.config.trainer.steps)
        if first <= run.step or last < first:
            if run.rank == 0 and last < first:
                _print(f"no step is profiled: the first one would be step {first}; set extensions.profile.first")
            return  # the steps of 'first' lie before the step at which the run resumes
        from mplug_profile.trace import StepTrace

        folder = run.directory / FOLDER
        self.trace = StepTrace(folder, range(first, last + 1), run.rank, run.device, own.stacks, own.shapes)
        self.trace.enter(run.step)

    @hookimpl
    def step_started(self, run: "Run") -> None:
        """Begin the recording, or go on with it."""
        if self.trace is not None:
            self.trace.enter(run.step)

    @hookimpl
    def run_finished(self) -> None:
        """Write what is recorded."""
        self._end_trace()
        self._end_memory()

    @hookimpl
    def run_failed(self, run: "Run", error: BaseException) -> None:
        """Write the snapshot if the memory is exhausted, and what is recorded of the steps."""
        if self.memory is not None and run.directory is not None and self.memory.is_exhausted(error):
            path = self.memory.write(run.directory / FOLDER, run.rank)
            _print(
                f"rank {run.rank} ran out of GPU memory; its allocations: {path}; open them: drop the file on "
                f"https://docs.pytorch.org/memory_viz, which reads it in your browser, or: python -m "
                f"torch.cuda._memory_viz trace_plot {path} -o memory.html"
            )
        self._end_memory()
        self._end_trace()

    def _end_trace(self) -> None:
        trace, self.trace = self.trace, None
        path = trace.end() if trace is not None else None
        if path is not None:
            _print(
                f"wrote a profile: {path}; open it: https://ui.perfetto.dev, 'Open trace file' (the file stays on your "
                f"machine), or chrome://tracing in Chrome"
            )

    def _end_memory(self) -> None:
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.end()


def _print(message: str) -> None:
    print(f"mplug: {message}", file=sys.stderr, flush=True)
