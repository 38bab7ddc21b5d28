"""The run of a case that changes its layout after its first step, in the memory of its processes."""

import warnings
from pathlib import Path
from typing import Any

from pair_runs import Trace, follow

from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug_heal.relayouts import move
from mplug_saving.changes import Changes
from mplug_saving.position import Position
from mplug_testing.harness import tiny_config


def run_live(settings: dict[str, Any], changed: dict[str, Any], folder: str) -> Trace:
    """Be one rank: a step with `settings`, another one with `changed`, and an evaluation."""
    warnings.simplefilter("ignore")  # torch's own, while it traces

    def between(run: Run, position: Position) -> None:
        position.saver.wait()
        new = prepare(tiny_config(changed), directory=run.directory)
        new.rank, new.step = run.rank, run.step
        move(run, position, new, Changes())

    return follow(settings, Path(folder), between=between)
