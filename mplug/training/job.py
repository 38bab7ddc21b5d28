"""The description of a run that each of its processes receives, and the work of such a process."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from mplug.config.binding import RunConfig
from mplug.config.sources import Settings, merge, read_assignments
from mplug.distributed.heartbeat_transport import beating_to, watching
from mplug.distributed.heartbeats import Beat
from mplug.distributed.launch import agreed, joined
from mplug.distributed.world import World, launched
from mplug.errors import RunError, UsageError
from mplug.registry.entry_points import Registry
from mplug.registry.hooks import HOST
from mplug.registry.resolve import resolve
from mplug.run.lock import Claim
from mplug.run.prepare import prepare
from mplug.run.record import provenance
from mplug.run.run import Run
from mplug.training.heart import heart_of
from mplug.training.shared_folder import refuse_unshared_folder


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


def settle(base: Settings, overrides: Settings, world: World | None) -> tuple[Run, Settings]:
    """The prepared run, and the overrides that produce it.

    If a launcher has started more processes than the layout names, the strategy of `parallel.data` takes the remaining
    ranks. Raises UsageError if the number of processes does not fit the layout.
    """
    config = resolve(Registry(), base, overrides)
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
    return prepare(resolve(Registry(), base, overrides)), overrides


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


def work(job: Job, send: Callable[[int | Beat], None] | None = None) -> Outcome:
    """Do the work of one process of a run: join the other processes, if there are any, and train.

    It calls `send` with the number of every step, and with a heartbeat every second.
    """
    config, world = resolve(Registry(), job.base, job.overrides), launched()
    rank = world.rank if world else 0
    run = prepare(config, _observers(config, rank))
    run.pulse.send = send
    from mplug.model.build import choose_device  # imports torch, so only after the config is valid

    run.device = choose_device(config)
    run.claim = job.claim if rank == 0 else None
    with among(world, run, send):
        run.directory, resume_from = job.directory, job.resume_from
        if world is not None:
            run.directory, resume_from = agreed((run.directory, resume_from))  # nodes may see different folders
            if world.local_size != world.size:
                refuse_unshared_folder(run)
        outcome = _trained(run, replace(job, resume_from=resume_from))
    del run
    gc.collect()  # a process group that a reference cycle keeps alive aborts the interpreter at exit
    return outcome


@contextmanager
def among(world: World | None, run: Run, send: Callable[[Beat], None] | None = None) -> Iterator[None]:
    """Make this process one of the world's for the block: set the rank and the process groups of the run.

    With `trainer.deterministic`, the process computes deterministically in the block. It passes its heartbeats to
    `send`. If another launcher has started the processes, `send` is None and the ranks exchange heartbeats instead.
    """
    run.rank = world.rank if world else 0
    heart = heart_of(run)
    with _determinism(run), beating_to(send, heart):
        if world is None:
            yield
            return
        from mplug.distributed.groups import Groups

        run.pulse.enter("joining the other processes")
        own = heart if send is None else None
        timeout = timedelta(seconds=run.config.watchdog.collective)
        with joined(world, run.device, timeout, lambda: watching(own, world.size, f"{world.job}_{world.restart}")):
            run.groups = Groups(run.rank, timeout)
            _refuse_other_plugins(run)
            yield


def _determinism(run: Run) -> AbstractContextManager[None]:
    if not run.config.trainer.deterministic:
        return nullcontext()
    from mplug.training.determinism import deterministic  # imports torch and its compiler

    return deterministic()


def _trained(run: Run, job: Job) -> Outcome:
    from mplug.training.loop import train

    assert run.directory is not None
    ending = train(run, job.resume_from, job.deadline, job.allowed)
    return Outcome(run.directory, run.step, ending.val_loss, ending.signal, ending.out_of_time, ending.nothing_left)


def _refuse_other_plugins(run: Run) -> None:
    """Raise RunError unless every rank has the same plugins, in the same versions and order."""
    keys = ("plugin", "distribution", "version")
    plugins = run.gathered([[plugin[key] for key in keys] for plugin in provenance(run)["plugins"]])
    for rank, of_rank in enumerate(plugins):
        if of_rank != plugins[0]:
            raise RunError(
                f"rank {rank} has the plugins {of_rank}, and rank 0 has {plugins[0]}; install the same versions of the "
                f"same plugins on all machines"
            )


def _observers(config: RunConfig, rank: int) -> dict[str, object]:
    """The host's own observers, which run on rank 0 only. A failure of those named `HOST` ends the run."""
    from rich.console import Console

    from mplug.training.observers import LossPicture, MetricsFile, ProgressLine

    if rank != 0:
        return {}
    progress = ProgressLine(Console(), config.trainer.steps, config.trainer.log_every)
    return {f"{HOST}metrics": MetricsFile(), f"{HOST}progress": progress, LossPicture.NAME: LossPicture()}
