"""The layouts with fewer data-parallel ranks under which a run can go on, and the runs that cannot be healed."""

from collections.abc import Iterator
from math import gcd, prod
from typing import TYPE_CHECKING

from mplug.config.sources import Settings, merge, read_assignments
from mplug.errors import RunError, UsageError, listed
from mplug.registry.entry_points import Registry
from mplug.registry.provided import provided
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.job import Job

if TYPE_CHECKING:
    from mplug.distributed.world import World
    from mplug.training.preflight import Preflight

MOST = 8
"""Maximum number of smaller layouts: a run loses processes one by one, and may be resumed at any time."""
EMPTY = '""'
SOURCE = "a process has died"


def refuse_unhealable(run: Run, world: "World | None", spares: int) -> None:
    """Raise UsageError for a run whose processes cannot go on after one of them has died."""
    if world is not None:
        raise UsageError(
            f"extensions.heal: {world.launcher} ends all processes of a run when one dies; let 'mplug train' start "
            f"the processes, or leave the extension out"
        )
    if run.mesh.world_size == 1:
        raise UsageError("extensions.heal: a run of one process has no other one to go on in; name a layout")
    refuse_meeting_again(run, spares)
    if run.mesh.independent:
        raise UsageError(
            f"extensions.heal: workers of this run train on their own ({listed(run.mesh.independent)}), so no other "
            f"process holds the state of a dead one; leave the extension out"
        )
    if run.config.trainer.graphs:
        raise UsageError(
            "extensions.heal: recorded graphs (trainer.graphs) keep the process groups of a dead process; set "
            "trainer.graphs=false"
        )
    if run.config.parallel.read_once:
        raise UsageError(
            "extensions.heal: the threads of parallel.read_once wait for a dead process; set parallel.read_once=false"
        )
    from mplug.model.build import build_model  # imports torch: what the config alone refuses comes before

    if build_model(run).engine is not None:
        raise UsageError("extensions.heal: the engine of another framework keeps the parts of this run")


def refuse_meeting_again(run: Run, spares: int) -> None:
    """Raise UsageError for a run on GPUs of which more than one process could go on: that has never worked."""
    from mplug.model.build import choose_device  # imports torch

    device = choose_device(run.config) if run.device == "auto" else run.device
    if device.startswith("cuda") and (spares or run.mesh.world_size > 2):
        raise UsageError(
            f"extensions.heal: on GPUs, processes that meet again after a death have died of SIGSEGV, so only a run of "
            f"two processes without spare ones can go on, in one process; this run has {run.mesh.world_size} and "
            f"{spares} spare; leave the extension out, and use --restarts (with extensions.local_checkpoints, a "
            f"restart repeats few steps)"
        )


def rehearsed(job: Job, *_: object) -> None:
    """Build the model of a run on the meta device, in a process that waits: this imports all of its plugins."""
    from mplug.model.build import build_model  # imports torch
    from mplug.training import loop  # noqa: F401 (what the work imports later)

    build_model(prepare(resolve(Registry.of_process(), job.base, job.overrides)))


def smaller_layouts(run: Run, base: Settings, overrides: Settings) -> dict[int, Settings]:
    """The settings for each smaller number of processes with which the run can go on, from large to small."""
    found: dict[int, Settings] = {}
    for word in _words(run):
        try:
            size, settings = _smaller(run, base, overrides, word)
        except (UsageError, RunError):
            continue
        found.setdefault(size, settings)
        if len(found) == MOST:
            break
    return dict(sorted(found.items(), reverse=True))


def _words(run: Run) -> Iterator[str]:
    """The layouts with a smaller degree of one strategy, the largest first."""
    degrees = run.config.parallel.degrees
    smaller = [{**degrees, name: lower} for name, degree in degrees.items() for lower in range(1, degree)]
    for one in sorted(smaller, key=lambda one: -prod(one.values())):
        yield "".join(f"{name}{degree}" for name, degree in one.items() if degree > 1)


def _smaller(run: Run, base: Settings, overrides: Settings, word: str) -> tuple[int, Settings]:
    """(processes, settings) of the run under a layout. UsageError unless it divides only its data among fewer ranks."""
    from mplug.model.build import build_model  # imports torch
    from mplug_invariance import mixes_samples

    layout = f"parallel.layout={word or EMPTY}"
    free = read_assignments([layout, "trainer.micro_batch_size=null"], SOURCE)
    other = prepare(resolve(Registry.of_process(), base, merge(overrides, free)))
    if other.mesh.world_size >= run.mesh.world_size or _of_model(other) != _of_model(run):
        raise UsageError(f"layout '{word}' divides the model in another way")
    size = _micro_batch_size(run, other)
    settings = read_assignments([layout, f"trainer.micro_batch_size={size}"], SOURCE)
    other = prepare(resolve(Registry.of_process(), base, merge(overrides, settings)))
    model = build_model(other)
    if size != run.micro_batch_size and mixes_samples(model):
        raise UsageError("a module mixes the samples of a micro batch, and the micro batches would differ")
    preflight: Preflight | None = provided("preflights")
    if preflight is not None:
        preflight.refuse(other, model, None)
    return other.mesh.world_size, settings


def _micro_batch_size(run: Run, other: Run) -> int:
    """The largest size that divides each rank's part of every batch, up to that of the run: it needs no more memory."""
    trainer, rampup = run.config.trainer, run.config.schedule.batch_rampup
    sizes = [trainer.global_batch_size, *([] if rampup.start is None else [rampup.start, rampup.increment])]
    share = gcd(*sizes) // other.mesh.batch_shard(0)[1]
    return max(size for size in range(1, run.micro_batch_size + 1) if share % size == 0)


def _of_model(run: Run) -> dict[str, int]:
    """The mesh axes that divide the model, and their sizes."""
    from mplug_invariance import divides_samples_alone  # imports torch

    axes = run.mesh.axes.items()
    return {name: axis.size for name, axis in axes if axis.size > 1 and not divides_samples_alone(axis)}
