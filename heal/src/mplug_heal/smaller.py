"""The layouts with fewer data-parallel ranks under which a run can go on, and the runs that cannot be healed."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mplug.config.sources import Settings, merge, read_assignments
from mplug.errors import RunError, UsageError, listed
from mplug.registry.entry_points import PREFLIGHTS, Registry
from mplug.registry.provided import provided
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run

if TYPE_CHECKING:
    from mplug.distributed.world import World
    from mplug.training.preflight import Preflight

MOST = 8
"""Maximum number of smaller layouts: a run loses processes one by one, and may be resumed at any time."""
EMPTY = '""'
SOURCE = "a process has died"


def refuse_unhealable(run: Run, world: "World | None") -> None:
    """Raise UsageError for a run whose processes cannot go on after one of them has died."""
    if world is not None:
        raise UsageError(
            f"extensions.heal: {world.launcher} ends all processes of a run when one dies; let 'mplug train' start "
            f"the processes, or leave the extension out"
        )
    if run.mesh.world_size == 1:
        raise UsageError("extensions.heal: a run of one process has no other one to go on in; name a layout")
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


def smaller_layouts(run: Run, base: Settings, overrides: Settings) -> dict[int, Settings]:
    """The settings for each smaller number of processes with which the run can go on, from large to small."""
    found: dict[int, Settings] = {}
    for word in _words(run):
        for settings in _choices(run, word):
            candidate = _checked(run, base, merge(overrides, settings))
            if candidate is not None and candidate.mesh.world_size not in found:
                found[candidate.mesh.world_size] = settings
                break
        if len(found) == MOST:
            break
    return dict(sorted(found.items(), reverse=True))


def _words(run: Run) -> Iterator[str]:
    """The layouts with a smaller degree of one strategy, the largest first."""
    degrees = run.config.parallel.degrees
    smaller = [{**degrees, name: lower} for name, degree in degrees.items() for lower in range(1, degree)]
    for one in sorted(smaller, key=lambda one: -sum(one.values())):
        yield "".join(f"{name}{degree}" for name, degree in one.items() if degree > 1)


def _choices(run: Run, word: str) -> Iterator[Settings]:
    """The settings of a layout: with the same micro batches if they divide the batch, which need no more memory."""
    assignments = [f"parallel.layout={word or EMPTY}"]
    if run.config.trainer.micro_batch_size is None:
        yield read_assignments([*assignments, f"trainer.micro_batch_size={run.micro_batch_size}"], SOURCE)
    yield read_assignments(assignments, SOURCE)


def _checked(run: Run, base: Settings, overrides: Settings) -> Run | None:
    """The run under these settings, if it divides only its data among fewer ranks; None otherwise."""
    from mplug.model.build import build_model  # imports torch

    preflight: Preflight | None = provided(PREFLIGHTS)
    try:
        other = prepare(resolve(Registry(), base, overrides))
        if other.mesh.world_size >= run.mesh.world_size or _of_model(other) != _of_model(run):
            return None
        model = build_model(other)
        if preflight is not None:
            preflight.refuse(other, model, None)
    except (UsageError, RunError):
        return None
    return other


def _of_model(run: Run) -> dict[str, int]:
    """The mesh axes that divide the model, and their sizes."""
    return {
        name: axis.size
        for name, axis in run.mesh.axes.items()
        if axis.size > 1 and (axis.splits or "batch" not in axis.entries)
    }
