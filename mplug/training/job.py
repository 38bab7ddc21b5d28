"""The description of a run that each of its processes receives, and the work of such a process."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mplug.config.binding import RunConfig
from mplug.config.sources import Settings, merge, read_assignments
from mplug.distributed.supervision import Send, Supervisor
from mplug.distributed.world import World, attempt
from mplug.errors import UsageError
from mplug.registry.entry_points import Registry
from mplug.registry.hooks import HOST
from mplug.registry.implementation import hookimpl
from mplug.registry.provided import needed, provided
from mplug.registry.resolve import resolve
from mplug.run.activity import Activity
from mplug.run.claim import Claim
from mplug.run.launching import agreed, launched, launching
from mplug.run.prepare import prepare
from mplug.run.run import Run

if TYPE_CHECKING:
    from mplug.training.saving import Saving


@dataclass(frozen=True)
class Job:
    """The description of a run that the command passes to each of its processes: plain data that can be pickled."""

    base: Settings
    overrides: Settings
    directory: Path
    resume_from: Path | None
    deadline: float | None = None
    """The time at which the run must have ended, in seconds since the epoch."""
    allowed: tuple[str, ...] = ()
    """The fields and sections that the user allows to change on resume."""
    claim: Claim | None = None
    """The lock of the directory; rank 0 confirms it."""
    layouts: Mapping[int, Settings] = field(default_factory=dict)
    """The settings with which the run goes on in fewer processes, by their number (`Healing.layouts`)."""
    kept: dict[str, Any] = field(default_factory=dict)
    """`Run.kept`: in each process, it is the same object as long as the process lives."""

    def settings(self, world: World | None) -> Settings:
        """The overrides of the run in this world."""
        return merge(self.overrides, self.layouts.get(1 if world is None else world.size, {}))


def settle(base: Settings, overrides: Settings, world: World | None) -> tuple[Run, Settings]:
    """The prepared run, and the overrides that produce it.

    If a launcher has started more processes than the layout names, the strategy of `parallel.data` takes the remaining
    ranks. Raises UsageError if the number of processes does not fit the layout.
    """
    config = resolve(Registry.of_process(), base, overrides)
    run = prepare(config)
    parallel, size = config.parallel, run.mesh.world_size
    if world is None or world.size == size:
        return run, overrides
    if world.size % size or parallel.rest is None:
        allowed = f"{size} processes" if parallel.rest is None else f"a multiple of {size} processes"
        raise UsageError(
            f"layout '{parallel.layout}' needs {allowed}, and {world.launcher} has started {world.size}; "
            f"change the layout, or start {allowed}"
        )
    filled = prepare(config, world_size=world.size).config.parallel.layout
    overrides = merge(overrides, read_assignments([f"parallel.layout={filled}"], f"the {world.size} processes"))
    return prepare(resolve(Registry.of_process(), base, overrides)), overrides


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its last step and validation loss, and the reason if it stopped early."""

    directory: Path
    step: int
    val_loss: float | None = None
    signal: int | None = None
    out_of_time: bool = False
    nothing_left: bool = False
    """The run had done all its steps before."""


def work(job: Job, send: Send | None = None) -> Outcome:
    """Do the work of one process of a run: join the other processes, if there are any, and train.

    It calls `send` with the number of every step; a plugin that supervises the run may send messages.
    """
    world = launched()
    config, rank = resolve(Registry.of_process(), job.base, job.settings(world)), world.rank if world else 0
    run = prepare(config, _observers(config, rank, send))
    run.kept = job.kept
    from mplug.model.build import choose_device  # imports torch, so only after the config is valid

    run.device = choose_device(config)
    run.claim = job.claim if rank == 0 else None
    with among(world, run, supervisor_of(run), send):
        run.directory, resume_from = job.directory, _beginning_of(job, send)
        if world is not None:
            run.directory, resume_from = agreed((run.directory, resume_from))  # nodes may see different folders
            launching(f"a run of {world.size} processes").find_folder(run, world)
        outcome = _trained(run, replace(job, resume_from=resume_from))
    del run
    gc.collect()  # a process group that a reference cycle keeps alive aborts the interpreter at exit
    return outcome


def _beginning_of(job: Job, send: Send | None) -> Path | None:
    """The checkpoint from which the run continues; the newest one if its processes begin again after a death."""
    saving: Saving | None = provided("savers") if send is not None and attempt() else None
    return job.resume_from if saving is None else saving.newest(job.directory, restarted=True)


COLLECTIVE_SECONDS = 1800.0
"""Seconds after which torch ends a collective of a run that no plugin supervises."""


def supervisor_of(run: Run) -> Supervisor | None:
    """The object of the plugin that finds processes of this run that hang; None if the config names no such plugin."""
    supervisor: Supervisor | None = run.hooks.call.supervise(run=run)
    return supervisor


@contextmanager
def among(
    world: World | None, run: Run, supervisor: Supervisor | None = None, send: Send | None = None
) -> Iterator[None]:
    """Make this process one of the world's for the block: set the rank and the process groups of the run.

    With `trainer.deterministic`, the process computes deterministically in the block. The supervisor sends its reports
    through `send`. If another launcher has started the processes, `send` is None, and the supervisors of all ranks
    exchange their reports.
    """
    run.rank = world.rank if world else 0
    with _determinism(run), supervisor.report(send) if supervisor and send else nullcontext():
        if world is None:
            yield
            return
        from mplug.distributed.groups import Groups

        run.enter("joining the other processes")
        timeout = timedelta(seconds=supervisor.collective_seconds if supervisor else COLLECTIVE_SECONDS)

        def exchanging() -> AbstractContextManager[None]:
            return supervisor.exchange(f"{world.job}_{world.restart}") if supervisor and not send else nullcontext()

        with launching(f"a run of {world.size} processes").joined(world, run.device, timeout, exchanging):
            run.groups = Groups(run.rank, timeout)
            if (found := provided("invariances")) is not None:
                found.refuse_other_plugins(run)
            yield


def _determinism(run: Run) -> AbstractContextManager[None]:
    if not run.config.trainer.deterministic:
        return nullcontext()
    computing: AbstractContextManager[None] = needed(
        "steps", "trainer.deterministic=true", "mplug-steps"
    ).deterministic()
    return computing


def _trained(run: Run, job: Job) -> Outcome:
    from mplug.training.loop import train

    assert run.directory is not None
    ending = train(run, job.resume_from, job.deadline, job.allowed)
    return Outcome(run.directory, run.step, ending.val_loss, ending.signal, ending.out_of_time, ending.nothing_left)


class StepMessages:
    """Sends the number of every step to the launcher when the step begins."""

    def __init__(self, send: Send) -> None:
        self._send = send

    @hookimpl
    def activity_began(self, run: Run) -> None:
        """Send the number if the activity is a step."""
        if run.activity.name == Activity.STEP:
            self._send(run.activity.step)


class Shown(Protocol):
    """The method of the class in the entry-point group 'mplug.progress'."""

    def observer(self, config: RunConfig) -> object:
        """An object with the hooks of observers that shows progress, on rank 0. Its failures end the run."""


def _observers(config: RunConfig, rank: int, send: Send | None = None) -> dict[str, object]:
    """The host's own observers. Most run on rank 0 only. A failure of one of them ends the run."""
    from mplug.training.metrics_writer import MetricsFile

    messages: dict[str, object] = {f"{HOST}messages": StepMessages(send)} if send is not None else {}
    if rank != 0:
        return messages
    shown: Shown | None = provided("progress")
    progress = {} if shown is None else {f"{HOST}progress": shown.observer(config)}
    return {**messages, f"{HOST}metrics": MetricsFile(), **progress}
