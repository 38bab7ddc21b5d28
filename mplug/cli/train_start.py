"""The start of `mplug train`: everything that is decided, and refused, before a training process starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.errors import UsageError
from mplug.registry.provided import provided

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mplug.config.sources import Settings
    from mplug.distributed.world import World
    from mplug.run.claim import Claim
    from mplug.run.launching import Healing
    from mplug.run.run import Run
    from mplug.training.job import Job
    from mplug.training.saving import Changes, Checkpoint, Saving


NOTHING_SAVED = "nothing is saved, because mplug-saving is not installed"
NOTHING_EVALUATED = "nothing is evaluated, because mplug-validation is not installed"
NOTHING_SHOWN = "no progress is shown, because mplug-progress is not installed"


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    name: str | None
    resume: bool
    allowed: tuple[str, ...]
    """The fields and sections that may differ from the checkpoint's."""
    overrides: "Settings"
    master_port: int | None = None
    restarts: int = 0


@dataclass(frozen=True)
class Start:
    """A run that may start. `claim` is the lock of its folder, on the process that has it."""

    request: Request
    world: "World | None"
    run: "Run"
    base: "Settings"
    changes: "Settings"
    resume_from: Path | None
    readable: "Checkpoint | None"
    weights: str | None
    """The weights with which the run begins, for a message; None: it has its own."""
    since: "Changes | None"
    """The changes since the checkpoint; None if no package saves runs."""
    about: list[str]
    """What the data plugin reports about its data, and settings that do not fit the weights."""
    about_step: list[str]
    """What a step is, how long it takes at least, and what the recipe needs that this machine lacks."""
    claim: "Claim | None"
    healing: "Healing | None" = None
    """How the run goes on after a process has died; None: it ends."""

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for the run: it is the only one, or rank 0 of those that a launcher started."""
        return _is_first(self.world)

    def job(self, deadline: float | None) -> "Job":
        """The job that each training process receives."""
        from mplug.training.job import Job

        assert self.run.directory is not None
        layouts = {} if self.healing is None else self.healing.layouts
        return Job(
            self.base,
            self.changes,
            self.run.directory,
            self.resume_from,
            deadline,
            self.request.allowed,
            self.claim,
            layouts,
        )

    def lines(self) -> list[str]:
        """The announcement of the run."""
        from mplug.registry.beginnings import names_some

        run = self.run
        layout = f", {run.config.parallel.layout} on {run.mesh.world_size} processes" if run.mesh.world_size > 1 else ""
        steps = run.config.trainer.steps
        where = beginning(self.readable, self.weights, run if self.request.resume else None)
        found = provided("beginnings") if names_some(run.config.settings) else None
        return [
            f"run {run.directory}: {steps} step{'s' * (steps != 1)}, {where}{layout}",
            *(f"  {line}" for line in (found.about_config(run.config) if found is not None else ())),
            *([f"  {NOTHING_SAVED}"] if self.since is None else ()),
            *([f"  {NOTHING_EVALUATED}"] if run.config.trainer.eval_every and provided("validations") is None else ()),
            *([f"  {NOTHING_SHOWN}"] if provided("progress") is None else ()),
            *(f"  changed since the checkpoint: {line}" for line in (self.since.lines() if self.since else ())),
            *(f"  {sentence}" for sentence in self.about),
            *(f"  {sentence}" for sentence in self.about_step),
        ]


def prepare_start(
    request: Request, world: "World | None", saving: "Saving | None", lock: "AbstractContextManager[object]"
) -> Start:
    """Prepare the run that is asked for, and take the lock of its folder; UsageError for what cannot run.

    The config and the data come first, because they need no torch; then the checkpoint; then the model, on the meta
    device.
    """
    from mplug.run.folder import find_directory, new_directory
    from mplug.run.launching import launching
    from mplug.run.metrics_file import METRICS, read_lines
    from mplug.run.prepare import check_data
    from mplug.training.healing import healer_of
    from mplug.training.job import settle

    restarted, first = world is not None and world.restart > 0, _is_first(world)
    _refuse_options(request, world)
    directory = find_directory(request.name) if _continues(request, restarted) else None
    claim = saving.claim_existing(lock, directory, request.name) if first and saving is not None else None
    base = _base(directory)
    run, changes = settle(base, request.overrides, world)
    if run.mesh.world_size > 1 or request.restarts or request.master_port is not None:
        launcher = launching("a run of several processes (--parallel) or of several attempts (--restarts)")
        if request.master_port is not None:
            launcher.refuse_port_in_use(request.master_port)
    about_data = check_data(run)
    resume_from = None if saving is None else directory
    if saving is not None and directory is not None and _is_complete(run, world, directory):
        resume_from = saving.newest(directory, restarted)
    if directory is not None and first:
        read_lines(directory / METRICS)  # refuses a damaged file; only the first rank writes it
    readable = saving.readable(resume_from) if saving is not None and _reads_checkpoints(world) else None
    since = None if saving is None else saving.changes(run, readable, request.allowed)
    run.directory = directory or new_directory(run.config, request.name, check=first)
    weights, about, about_step = _refuse_model(run, world, saving, resume_from, readable, since, request.overrides)
    healer = healer_of(run)
    healing = None if healer is None else healer.plan(run, world, base, changes)
    if first and saving is not None:
        claim = claim or saving.claim_new(lock, run, request.name)
    about = [*about_data, *about]
    return Start(
        request, world, run, base, changes, resume_from, readable, weights, since, about, about_step, claim, healing
    )  # fmt: skip


def _is_complete(run: "Run", world: "World | None", directory: Path) -> bool:
    """Let a plugin that joins checkpoints complete this machine's folder. False in processes that do not wait for it.

    These receive the checkpoint to continue from later, from rank 0.
    """
    gatherer = run.hooks.call.gather_checkpoints(config=run.config)
    if gatherer is not None and _reads_checkpoints(world):
        gatherer.complete(directory)
    return gatherer is None or _reads_checkpoints(world)


def _is_first(world: "World | None") -> bool:
    return world is None or world.rank == 0


def _reads_checkpoints(world: "World | None") -> bool:
    """Whether this process validates the checkpoint before the run starts: one process per machine does."""
    return world is None or world.local_rank == 0


def _refuse_options(request: Request, world: "World | None") -> None:
    """Refuse options that contradict each other, or that a launcher has, and a restartable run without a name."""
    if world is not None:
        if request.restarts:
            raise UsageError(
                f"--restarts applies only to processes that this command starts; use the option of {world.launcher}"
            )
        if world.may_restart and request.name is None and not request.resume:
            raise UsageError(f"{world.launcher} may restart processes, which find their run by its name; add --name")
        if request.master_port is not None:  # all of its processes must use the same port
            remedy = "use torchrun's --master-port" if world.launcher == "torchrun" else "set MASTER_PORT instead"
            raise UsageError(f"--master-port applies only to processes that this command starts; {remedy}")
    if request.allowed and not request.resume:
        raise UsageError("--allow-change applies only to resumed runs; add --resume, or remove --allow-change")


def _continues(request: Request, restarted: bool) -> bool:
    """Whether the run exists: the user continues it, or a launcher has restarted this process."""
    from mplug.run.folder import RUNS

    return request.resume or (restarted and (RUNS / str(request.name) / "config.yaml").is_file())


def _base(directory: Path | None) -> "Settings":
    from mplug.config.defaults import default_settings, saved_settings

    return saved_settings(directory) if directory else default_settings()


def _refuse_model(
    run: "Run",
    world: "World | None",
    saving: "Saving | None",
    resume_from: Path | None,
    readable: "Checkpoint | None",
    since: "Changes | None",
    overrides: "Settings",
) -> tuple[str | None, list[str], list[str]]:
    """Build the model on the meta device, and refuse what cannot train.

    Returns the weights with which the run begins, lines about them, and lines about a step.
    """
    from mplug.model.build import build_model  # imports torch: refused configs end before
    from mplug.training.beginnings import beginnings_of
    from mplug.training.preflight import Preflight
    from mplug.training.save_times import save_times_of

    model = build_model(run)
    save_times_of(run)  # refuses what no installed package serves
    preflight: Preflight | None = provided("preflights")
    if preflight is not None:
        preflight.refuse(run, model, world)
    if saving is not None:
        saving.refuse_model(run, model, readable, since)
    found, weights, lines = beginnings_of(run, model), None, list[str]()
    if found is not None:
        weights, lines = found.check(run, model, is_new=not resume_from, is_reader=_reads_checkpoints(world))
    about = [] if preflight is None else preflight.about_settings(run, overrides)
    done = readable.manifest["step"] if readable is not None else 0
    step = [] if preflight is None or not _is_first(world) else preflight.about_steps(run, model, world, done)
    memory = [] if preflight is None else preflight.about_memory(run, model, world)
    return weights, [*lines, *memory], [*about, *step]


def beginning(readable: "Checkpoint | None", weights: str | None, again: "Run | None" = None) -> str:
    """Text about the start of a run, 'from step 100' or 'from scratch'; `again` is one that continues, if any."""
    if readable is not None:
        return f"from step {readable.manifest['step']}"
    if again is not None and again.hooks.implementers("copies"):
        return "without a shared checkpoint"
    return f"with the weights of {weights}" if weights is not None else "from scratch"
