"""Change the layout of a run between two steps, in the same processes and without files."""

import gc
import logging
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from mplug.config.sources import from_mapping, read_assignments
from mplug.errors import RunError, UsageError, listed
from mplug.model.build import build_model
from mplug.model.invariance import layout_dependence_of_all
from mplug.registry.entry_points import Registry
from mplug.registry.hooks import Hooks
from mplug.registry.provided import provided
from mplug.registry.resolve import resolve
from mplug.run.folder import make_directory
from mplug.run.launching import launched
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug.training.preflight import Preflight
from mplug.training.saving import Position as Saved
from mplug_heal.live_state import LiveState, capture, fill
from mplug_heal.records import record_change
from mplug_heal.requests import Answer, Request, give, is_asked, take
from mplug_heal.saying import say
from mplug_saving.boxes import held_boxes
from mplug_saving.changes import OBSERVING, Changes, changes_between, refuse_other_micro_batches
from mplug_saving.position import Position
from mplug_saving.rank_exchanges import from_rank, raise_alike

log = logging.getLogger("mplug")

INTERVAL = 0.5
"""Seconds between two looks at the run's folder, which may be on a file system that answers in milliseconds."""
COMMAND = "mplug runs relayout"
PATIENCE = timedelta(minutes=5)
"""How much longer than the first rank the last one may build; less than torch's time-outs, which say nothing."""


class Relayouts:
    """The class of the entry-point group 'mplug.relayouts'."""

    def __init__(self) -> None:
        self._looked = -INTERVAL

    def is_requested(self, run: Run) -> bool:
        """Whether the run's folder has a request."""
        now = time.monotonic()
        if run.directory is None or now - self._looked < INTERVAL:
            return False
        self._looked = now
        return is_asked(run.directory)

    def change(self, run: Run, position: Saved) -> None:
        """Serve the request in the run's folder: change the layout, or refuse it with the reason. Collective."""
        began, step = time.monotonic(), run.step
        request, refusal = from_rank(run, 0, _taken(run))
        if request is None and refusal is None:
            return  # withdrawn
        if request is None:
            say(run, str(refusal))
            return
        old = run.config.parallel.layout
        try:
            if not isinstance(position, Position):
                raise UsageError("the run is not saved by mplug-saving, whose parts of weights and states are moved")
            new, changes = _planned(run, position, request)
            num_bytes = move(run, position, new, changes)
        except UsageError as error:
            say(run, f"the layout stays '{old}': {error}")
            _answer(run, Answer(request.number, "refused", str(error), step))
            return
        seconds, layout = time.monotonic() - began, run.config.parallel.layout
        total = int(run.summed(torch.tensor(float(num_bytes), dtype=torch.float64, device=run.device)))
        sentence = f"layout '{old}' -> '{layout}' after step {step}: {seconds:.1f} s, {total / 2**20:.1f} MiB sent"
        make_directory(run)
        record_change(run, {"step": step, "old": old, "new": layout, "seconds": round(seconds, 3), "bytes": total})
        say(run, sentence)
        for line in changes.lines():
            log.info("changed after step %d: %s", step, line)
        _answer(run, Answer(request.number, "changed", sentence, step))


def _taken(run: Run) -> tuple[Request | None, str | None]:
    """(the request, None), or (None, why the file is no request) on rank 0; (None, None) if it was withdrawn."""
    if run.rank != 0:
        return None, None
    assert run.directory is not None
    try:
        return take(run.directory), None
    except UsageError as error:
        return None, str(error)


def _answer(run: Run, answer: Answer) -> None:
    if run.rank == 0:
        assert run.directory is not None
        give(run.directory, answer)


# What is refused before anything changes.


def _planned(run: Run, position: Position, request: Request) -> tuple[Run, Changes]:
    """The run under the requested layout, on the meta device, and what it changes.

    UsageError, on all ranks alike, if it cannot train or would train differently.
    """
    found: list[tuple[Run, Changes]] = []
    raise_alike(run, _error_of(lambda: found.append(_checked(run, position, request.layout))))
    return found[0]


def _checked(run: Run, position: Position, layout: str) -> tuple[Run, Changes]:
    _refuse_fixed(run, position)
    new = _under(run, layout)
    if new.config.parallel.layout == run.config.parallel.layout:
        raise UsageError(f"the run has the layout '{new.config.parallel.layout}' already; name another one")
    if new.mesh.independent:
        raise UsageError(
            f"'{layout}' has workers that train on their own ({listed(new.mesh.independent)}), and would change how "
            f"the run trains; name a layout without them"
        )
    changes = changes_between(position.facts(), new)
    if changes.refused:
        raise UsageError(f"the run would train differently with {listed(map(str, changes.refused))}; keep the layout")
    world, model = launched(), build_model(new)
    preflight: Preflight | None = provided("preflights")
    if preflight is not None:
        preflight.refuse(new, model, world)
        for line in preflight.about_memory(new, model, world):
            log.warning("%s", line)
    refuse_other_micro_batches(model, changes)
    return new, changes


def _refuse_fixed(run: Run, position: Position) -> None:
    """Raise UsageError for a run whose layout another library or a recorded graph keeps."""
    remedy = "stop the run, and resume it under the other layout"
    if run.mesh.independent:
        raise UsageError(f"workers of this run train on their own ({listed(run.mesh.independent)}); {remedy}")
    if position.parts.model.engine is not None:
        raise UsageError(f"the engine of another framework keeps the parts of this run; {remedy}")
    if run.config.trainer.graphs:
        raise UsageError(f"the recorded graphs of this run (trainer.graphs) keep its process groups in use; {remedy}")


def _under(run: Run, layout: str) -> Run:
    """The same run under another layout. Its extensions and observers are the objects that the run has now."""
    base = from_mapping(run.config.resolved(), "the config of the run")
    settings = read_assignments([f"parallel.layout={layout}"], f"{COMMAND} --parallel {layout}")
    config = resolve(Registry.of_process(), base, settings)
    new, size = prepare(config), run.mesh.world_size
    if new.mesh.world_size != size:
        if size % new.mesh.world_size or new.config.parallel.rest is None:
            raise UsageError(
                f"layout '{new.config.parallel.layout}' is for {new.mesh.world_size} ranks, and the run has {size}; "
                f"name a layout of {size} ranks"
            )
        new = prepare(config, world_size=size)
    replaced = {one.label for one in run.config.chosen if one.section[0] != OBSERVING}
    kept = {label: plugin for label, plugin in run.hooks.plugins.items() if label not in replaced}
    new.hooks = Hooks({**new.hooks.plugins, **kept})
    new.rank, new.device, new.directory, new.step = run.rank, run.device, run.directory, run.step
    return new


# The change itself.


def move(run: Run, position: Position, new: Run, changes: Changes) -> int:
    """Build the layout of `new` from the state of the run; the bytes that this rank received. Collective.

    No save may be under way. `new` is the same run on as many ranks, and `changes` goes into the history of the run.
    If a rank cannot build the new layout, or cannot continue its data there, build the old one again, and raise the
    reason as UsageError.
    """
    old_layout = run.config.parallel.layout
    live = capture(run, position)
    _release(run, position)
    run.become(new)
    meeting = from_rank(run, 0, uuid.uuid4().hex)
    try:
        _agree(run, meeting, _error_of(lambda: _build(run, position, live)))
        num_bytes = _load(run, position, live)
    except UsageError:
        _release(run, position)
        run.become(_under(run, old_layout))
        _return(run, position, live)
        raise
    position.history += changes.record(run.step)
    return num_bytes


def _agree(run: Run, meeting: str, error: UsageError | None) -> None:
    """Raise the error of a rank on all ranks, when all have built the new layout or failed. Collective.

    `meeting` is a key of the ranks' store that nothing else uses. RunError if a rank does not come: within its build,
    it waits for a rank that has failed. The memory of one rank alone may be too small.
    """
    if run.groups is not None:
        store, everyone = dist.distributed_c10d._get_default_store(), f"{meeting} everyone"
        if store.add(meeting, 1) == run.mesh.world_size:
            store.set(everyone, "")
        try:
            store.wait([everyone], PATIENCE)
        except RuntimeError as fault:
            reason = error or f"another rank has not built the new layout in {PATIENCE}"
            raise RunError(
                f"the layout cannot be changed, and not all ranks can go on: {reason}; resume from the last checkpoint"
            ) from fault
    raise_alike(run, error)


def _return(run: Run, position: Position, live: LiveState) -> None:
    """Build the layout that the run had, from its state. An error ends the run: it has no state to go on with."""
    try:
        position.move_to(build(run))
        _load(run, position, live)
    except UsageError as error:
        raise RunError(f"the old layout cannot be built again: {error}; resume from the last checkpoint") from error


def _build(run: Run, position: Position, live: LiveState) -> None:
    """Build the run's layout. UsageError if it needs a tensor that the state lacks."""
    position.move_to(build(run))
    for name, boxed in position.state(held_boxes).items():
        if live.index.shapes.get(name) != boxed.shape:
            raise UsageError(
                f"the new layout keeps '{name}' of shape {boxed.shape}, and the old one "
                f"{live.index.shapes.get(name, 'no such tensor')}"
            )


def _error_of(action: Callable[[], None]) -> UsageError | None:
    """The reason why a layout cannot be prepared or built. A bug of a plugin under it does not end the run."""
    try:
        action()
    except (UsageError, RunError) as error:
        return UsageError(str(error))
    except torch.OutOfMemoryError as error:
        return UsageError(f"the new layout does not fit into the memory of the GPU: {error}")
    except Exception as error:
        log.error("the new layout fails", exc_info=error)
        return UsageError(
            f"the new layout fails with {type(error).__name__}: {error}; logs/rank*.log have the traceback"
        )
    return None


def _release(run: Run, position: Position) -> None:
    """Free the parts of the run and its process groups, except those that torch made for all ranks."""
    vars(position).pop("parts", None)
    position.stateful = {}
    run.hooks.observe("training_released", run=run)
    if run.compiler is not None:
        torch.compiler.reset()  # compiled code keeps modules, and torch limits how often it compiles one function
    gc.collect()
    if run.device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if run.groups is not None:
        run.groups.close()


def _load(run: Run, position: Position, live: LiveState) -> int:
    """Fill the new parts of a run; the bytes that this rank received. Collective."""
    num_bytes = fill(run, live, position.state(held_boxes))
    position.filled()
    source = f"the state of the run after step {run.step}"
    raise_alike(
        run, _error_of(lambda: position.load_plain(source, live.plain))
    )  # a loader may refuse on one rank alone
    run.depends_on_layout = layout_dependence_of_all(run, position.parts.model)
    return num_bytes
