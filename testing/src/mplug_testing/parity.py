"""Compares a run under a layout with the same run in one process."""

import json

from mplug.config.sources import read_assignments
from mplug.errors import UsageError
from mplug.registry.entry_points import BrokenPlugin
from mplug_testing.harness import (
    Portions,
    TinySettings,
    Trace,
    as_they_come,
    difference,
    in_fp64,
    largest_error,
    tiny_config,
    tiny_run,
    tolerance_of,
    train_ranks,
)
from mplug_testing.suite import Fault, refusals, require
from mplug_testing.workers import WorkerFailed

_TRAINED: dict[str, list[Trace]] = {}


def trained_once(settings: TinySettings, portions: Portions = as_they_come) -> list[Trace]:
    """The traces of a run's ranks, from `train_ranks`. The tests of a process share the result of equal settings."""
    config = tiny_config(in_fp64(settings))
    sources = [(entry.label, entry.source) for entry in config.entries]
    key = json.dumps([config.resolved(), sources, portions.__name__])
    if key not in _TRAINED:
        _TRAINED[key] = train_ranks(tiny_run(settings).mesh.world_size, settings, portions)
    return _TRAINED[key]


def require_parity(settings: TinySettings, layout: str, named_by_author: bool = True) -> None:
    """Raise Fault unless the fp64 run under a layout equals that of one process.

    The bound is 1e-10 plus the tolerances that the run's plugins declare (`varies`). A refused layout is a Fault, or a
    SkipTest if the author did not name it. Settings may follow the layout: 'tp2 parallel.tp.sequence_parallel=false'.
    """
    traces = _traces(settings, layout, named_by_author)
    found = difference(*traces, tolerance_of(_under(settings, layout)))
    require(not found, f"the run under layout '{layout}' differs from one process: {found}")


def error_of(settings: TinySettings, layout: str) -> float:
    """The largest relative error of the run under a layout against that of one process.

    SkipTest if the layout is refused, Fault if its run fails.
    """
    return largest_error(*_traces(settings, layout, named_by_author=False))


def _traces(settings: TinySettings, layout: str, named_by_author: bool) -> tuple[list[Trace], Trace]:
    """The traces of all ranks under a layout, and the trace of one process."""
    divided = _under(settings, layout)
    alone = {**divided, "parallel.layout": ""}
    with refusals(f"layout '{layout}'", named_by_author):
        try:
            return train_ranks(_world_size(divided), divided), trained_once(alone)[0]
        except UsageError as error:
            if not isinstance(error, BrokenPlugin):
                _require_one_process(alone)
            raise
        except (WorkerFailed, TimeoutError) as error:
            raise Fault(f"the run under layout '{layout}' fails: {error}") from None


def _under(settings: TinySettings, layout: str) -> TinySettings:
    """The settings of the run under a layout, including the settings that follow the layout."""
    word, *assignments = layout.split() or [""]
    options = {".".join(key): setting.value for key, setting in read_assignments(assignments).items()}
    return {**settings, **options, "parallel.layout": word}


def _require_one_process(alone: TinySettings) -> None:
    """Raise Fault if the run is refused in one process too, so that its layout is not the cause."""
    try:
        _world_size(alone)
    except UsageError as error:
        raise Fault(f"the run is refused in one process, so no layout can be compared with it: {error}") from None


def _world_size(settings: TinySettings) -> int:
    """The number of ranks of a run; UsageError if it is refused before any process starts."""
    from mplug.model.build import build_model

    try:
        run = tiny_run(settings)
        build_model(run)
    except ValueError as error:
        raise Fault(str(error)) from error
    return run.mesh.world_size
