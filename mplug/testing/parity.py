"""A run under a layout against the same run in one process."""

import json

from mplug.errors import UsageError
from mplug.registry import BrokenPlugin
from mplug.settings import read_assignments
from mplug.testing.harness import (
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
from mplug.testing.suite import Fault, refusals, require
from mplug.testing.workers import WorkerFailed

_TRAINED: dict[str, list[Trace]] = {}


def trained_once(settings: TinySettings, portions: Portions = as_they_come) -> list[Trace]:
    """What the ranks of a run see, as `train_ranks` gives it: the run is made once for all tests of a process."""
    config = tiny_config(in_fp64(settings))
    sources = [(chosen.label, chosen.entry.source) for chosen in config.chosen]
    key = json.dumps([config.resolved(), sources, portions.__name__])
    if key not in _TRAINED:
        _TRAINED[key] = train_ranks(tiny_run(settings).mesh.world_size, settings, portions)
    return _TRAINED[key]


def require_parity(settings: TinySettings, layout: str, named_by_author: bool = True) -> None:
    """Raise Fault unless the run under a layout, in fp64, is that of one process.

    It is held to 1e-10, and to what its plugins declare (`varies`). A layout that is refused is a Fault, too; SkipTest
    where nobody asked for it by name. After the layout's word there may be settings:
    'tp2 parallel.tp.sequence_parallel=false'.
    """
    traces = _traces(settings, layout, named_by_author)
    found = difference(*traces, tolerance_of(_under(settings, layout)))
    require(not found, f"the run under the layout '{layout}' is not that of one process: {found}")


def error_of(settings: TinySettings, layout: str) -> float:
    """How far the run under a layout is from that of one process: the largest relative error of what is compared.

    SkipTest where the layout is refused, Fault where its run fails.
    """
    return largest_error(*_traces(settings, layout, named_by_author=False))


def _traces(settings: TinySettings, layout: str, named_by_author: bool) -> tuple[list[Trace], Trace]:
    """What all ranks see under a layout, and what one process sees."""
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
            raise Fault(f"the run fails under the layout '{layout}': {error}") from None


def _under(settings: TinySettings, layout: str) -> TinySettings:
    """The settings of the run under a layout, whose word may have settings behind it."""
    word, *assignments = layout.split() or [""]
    options = {".".join(key): setting.value for key, setting in read_assignments(assignments).items()}
    return {**settings, **options, "parallel.layout": word}


def _require_one_process(alone: TinySettings) -> None:
    """Raise Fault where it is not for its layout that a run is refused."""
    try:
        _world_size(alone)
    except UsageError as error:
        raise Fault(f"the run is refused in one process, so that no layout can be compared with it: {error}") from None


def _world_size(settings: TinySettings) -> int:
    """How many ranks a run has; UsageError where it is refused before any process starts."""
    from mplug.build import build_model

    try:
        run = tiny_run(settings)
        build_model(run)
    except ValueError as error:
        raise Fault(str(error)) from error
    return run.mesh.world_size
