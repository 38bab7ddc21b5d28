"""The run of a case in which a rank dies in its second step: the others go on from the copies in their memory.

The processes are those of a launch (`mplug.run.launching.launch`), and the rank is killed. In the first attempt, a rank
copies its state before and after the first step, and dies in the second one: in its forward and backward passes or
before its update. In the next attempt, the processes do the second step and the evaluation.
"""

import json
import os
import signal
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from pair_runs import Trace, begun, finished

from mplug.distributed.supervision import Send
from mplug.errors import RunError
from mplug.registry.resolve import resolve
from mplug.run.launching import Healing, launch, launched
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training import job as jobs
from mplug.training.healing import Healer, healer_of
from mplug.training.job import Job
from mplug_saving.position import Position
from mplug_testing.harness import installed_plugins, overrides_of, tiny_config, tiny_settings

SECONDS = 120.0
"""Seconds after which a collective fails. A case may not take as long: no rank waits for one that has left its work."""


def healing_of(settings: dict[str, Any]) -> Healing:
    """How the run of a case goes on after a death. UsageError if it cannot."""
    run = prepare(tiny_config(settings))
    return _healer(run).plan(run, None, tiny_settings(), overrides_of(settings))


def healed(settings: dict[str, Any], folder: Path) -> list[Trace]:
    """The records of the ranks that go on after a death."""
    size = prepare(tiny_config(settings)).mesh.world_size
    healing = healing_of(settings)
    job = Job(tiny_settings(), overrides_of(settings), folder / "run", None, layouts=healing.layouts)
    began = time.monotonic()
    left: int = launch(size, _attempt, job, _death(settings, size), healing=healing)
    if (seconds := time.monotonic() - began) > SECONDS:
        raise RunError(
            f"the ranks have gone on after {seconds:.0f} s: one has waited for a rank that had left its work"
        )
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(left)]


def _death(settings: dict[str, Any], size: int) -> tuple[int, str]:
    """The rank that dies, and the method of its stepper before which it does: any one, and the same in each run."""
    number = zlib.crc32(json.dumps(settings, sort_keys=True).encode())
    return number // 2 % size, ("forward_backward", "update")[number % 2]


def _attempt(job: Job, death: tuple[int, str], send: Send) -> int:
    """Be one rank, in the attempt in which one dies or in the next one; the number of ranks of this attempt."""
    warnings.simplefilter("ignore")  # torch's own, while it traces
    jobs.COLLECTIVE_SECONDS = SECONDS
    world = launched()
    run = prepare(resolve(installed_plugins(), job.base, job.settings(world)), directory=job.directory)
    run.kept = job.kept
    with jobs.among(world, run, None, send):
        position, healer = begun(run), _healer(run)
        if not healer.restore(run, position, None):
            healer.keep(run, position)
            finished(run, position, lambda run, position: _die_soon(run, position, healer, death))
            run.largest(torch.zeros(()))
            raise AssertionError("no rank has died")
        assert run.step == 1, f"the run continues after step {run.step}"
        torch.save(finished(run, position), job.directory.with_name(f"rank{run.rank}"))
    return run.mesh.world_size


def _die_soon(run: Run, position: Position, healer: Healer, death: tuple[int, str]) -> None:
    """Copy the state after the first step; on one rank, die in the next one."""
    healer.keep(run, position)
    rank, method = death
    if run.rank == rank:
        setattr(position.parts.stepper, method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def _healer(run: Run) -> Healer:
    healer = healer_of(run)
    assert healer is not None
    return healer
