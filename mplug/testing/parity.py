"""A run under a layout against the same run in one process."""

from unittest import SkipTest

from mplug.errors import UsageError
from mplug.settings import read_assignments
from mplug.testing.harness import TinySettings, difference, tiny_run, train_ranks, train_steps
from mplug.testing.suite import Fault, require
from mplug.testing.workers import WorkerFailed


def require_parity(settings: TinySettings, layout: str) -> None:
    """Raise Fault unless the run under a layout is that of one process; SkipTest where the run refuses the layout.

    After the layout's word there may be settings: 'tp2 parallel.tp.sequence_parallel=false'.
    """
    import torch

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
    with torch.random.fork_rng(devices=[]):
        reference = train_steps(alone)
    found = difference(traces, reference)
    require(not found, f"the run under the layout '{layout}' is not that of one process: {found}")


def _world_size(settings: TinySettings) -> int:
    """How many ranks a run has; SkipTest where it is refused before any process starts."""
    from mplug.build import build_model

    try:
        run = tiny_run(settings)
        build_model(run)
    except UsageError as error:
        raise SkipTest(f"layout '{settings['parallel.layout']}' is refused: {error}") from None
    except ValueError as error:
        raise Fault(str(error)) from error
    return run.mesh.world_size
