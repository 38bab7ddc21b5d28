"""The run of a case in which a rank dies in its second step: the others go on from the copies in their memory.

The processes are those of a launch (`mplug.run.launching.launch`), and the rank is killed. In the first attempt, a rank
copies its state before and after the first step, and dies in the second one: in its forward and backward passes or
before its update. In the next attempt, the processes do the second step and the evaluation.
"""

import json
import os
import shutil
import signal
import time
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pair_runs import Trace, begun, finished

from mplug.distributed.supervision import Send
from mplug.distributed.world import attempt
from mplug.errors import RunError
from mplug.registry.resolve import resolve
from mplug.run.launching import Healing, launch, launched
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training import job as jobs
from mplug.training.healing import Copies, Healer, copies_of, healer_of
from mplug.training.job import Job
from mplug_saving.position import Position
from mplug_testing.harness import installed_plugins, overrides_of, tiny_config, tiny_settings

SECONDS = 120.0
"""Seconds after which a collective fails. A case may not take as long: no rank waits for one that has left its work."""


LOCAL = "extensions.local_checkpoints"


@dataclass(frozen=True)
class Death:
    """The rank that dies, the method of its stepper before which it does, and its machine."""

    rank: int
    method: str
    machine: str


def healing_of(settings: dict[str, Any]) -> Healing:
    """How the run of a case goes on after a death. UsageError if it cannot."""
    run = prepare(tiny_config(settings))
    return _healer(run).plan(run, None, tiny_settings(), overrides_of(settings))


def healed(settings: dict[str, Any], folder: Path) -> list[Trace]:
    """The records of the ranks that go on after a death; from local disks, if the settings have local checkpoints."""
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


def on_disks(folder: Path) -> dict[str, Any]:
    """The settings of local checkpoints on the disks of two machines, which are folders."""
    local = {"folder": str(folder / "disk$MPLUG_MACHINE"), "machine": "$MPLUG_MACHINE", "every": 1}
    return {LOCAL: local}


def _death(settings: dict[str, Any], size: int) -> Death:
    """A death of any rank, and the same in each run, whose folder may be another one."""
    own = {name: value for name, value in settings.items() if name != LOCAL}
    number = zlib.crc32(json.dumps(own, sort_keys=True).encode())
    rank = number // 2 % size
    return Death(rank, ("forward_backward", "update")[number % 2], _machine_of(rank, size))


def _machine_of(rank: int, size: int) -> str:
    return str(rank * 2 // size)


def _attempt(job: Job, death: Death, send: Send) -> int:
    """Be one rank, in the attempt in which one dies or in the next one; the number of ranks of this attempt."""
    warnings.simplefilter("ignore")  # torch's own, while it traces
    jobs.COLLECTIVE_SECONDS = SECONDS
    world = launched()
    run = prepare(resolve(installed_plugins(), job.base, job.settings(world)), directory=job.directory)
    copies = copies_of(run)
    run.kept = job.kept if len(copies) == 1 else {}
    if attempt() == 0:
        os.environ["MPLUG_MACHINE"] = _machine_of(int(os.environ["RANK"]), run.mesh.world_size)
    else:  # a spare process has no machine yet; all processes remove the disk before they meet
        os.environ.setdefault("MPLUG_MACHINE", death.machine)
        shutil.rmtree(job.directory.with_name(f"disk{death.machine}"), ignore_errors=True)
    with jobs.among(world, run, None, send):
        position = begun(run)
        if not any(one.restore(run, position, None) for one in copies):
            copies[0].keep(run, position)
            finished(run, position, lambda run, position: _die_soon(run, position, copies, death))
            run.largest(torch.zeros(()))
            raise AssertionError("no rank has died")
        assert run.step == 1, f"the run continues after step {run.step}"
        torch.save(finished(run, position), job.directory.with_name(f"rank{run.rank}"))
    return run.mesh.world_size


def _die_soon(run: Run, position: Position, copies: Sequence[Copies], death: Death) -> None:
    """Copy the state after the first step; on one rank, die in the next one."""
    for one in copies:
        one.keep(run, position)
    if run.rank == death.rank:
        setattr(position.parts.stepper, death.method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def _healer(run: Run) -> Healer:
    healer = healer_of(run)
    assert healer is not None
    return healer
