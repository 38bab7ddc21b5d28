"""A run under a layout against the same run in one process."""

import json
from unittest import SkipTest

from mplug.errors import UsageError
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
    train_ranks,
)
from mplug.testing.suite import Fault, require
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


def require_parity(settings: TinySettings, layout: str) -> None:
    """Raise Fault unless the run under a layout, in fp64, is that of one process; SkipTest where it refuses the layout.

    After the layout's word there may be settings: 'tp2 parallel.tp.sequence_parallel=false'.
    """
    found = difference(*_traces(settings, layout))
    require(not found, f"the run under the layout '{layout}' is not that of one process: {found}")


def error_of(settings: TinySettings, layout: str) -> float:
    """How far the run under a layout is from that of one process: the largest relative error of what is compared.

    Raises as `require_parity` does, but where the error is too large.
    """
    return largest_error(*_traces(settings, layout))


def _traces(settings: TinySettings, layout: str) -> tuple[list[Trace], Trace]:
    """What all ranks see under a layout, and what one process sees."""
    word, *assignments = layout.split() or [""]
    options = {".".join(key): setting.value for key, setting in read_assignments(assignments).items()}
    alone, divided = ({**settings, **options, "parallel.layout": one} for one in ("", word))
    world_size = _world_size(divided)
    try:
        traces = train_ranks(world_size, divided)
    except UsageError as error:
        raise SkipTest(f"layout '{layout}' is refused: {error}") from None
    except (WorkerFailed, TimeoutError) as error:
        raise Fault(f"the run fails under the layout '{layout}': {error}") from None
    return traces, trained_once(alone)[0]


def _world_size(settings: TinySettings) -> int:
    """How many ranks a run has; SkipTest where its layout is refused before any process starts."""
    from mplug.build import build_model

    layout = settings["parallel.layout"]
    try:
        run = tiny_run(settings)
        build_model(run)
    except UsageError as error:
        require(layout, f"the run is refused in one process, so that no layout can be compared with it: {error}")
        _world_size({**settings, "parallel.layout": ""})
        raise SkipTest(f"layout '{layout}' is refused: {error}") from None
    except ValueError as error:
        raise Fault(str(error)) from error
    return run.mesh.world_size
