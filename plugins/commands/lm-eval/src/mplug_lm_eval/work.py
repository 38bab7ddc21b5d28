"""The work of `mplug lm-eval` in each of its processes: load the weights; rank 0 runs the tasks, the others follow.

The command imports this module before it has checked its options, so functions import torch and the harness themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mplug import Run
    from mplug.commands import Settings
    from mplug_lm_eval.wanted import Wanted
    from mplug_pretrained import SavedModel
    from mplug_sampling import Sampler


@dataclass(frozen=True)
class Job:
    """What each process does: plain data that can be pickled."""

    base: "Settings"
    overrides: "Settings"
    weights: "SavedModel"
    wanted: "Wanted"


def work(job: Job, send: Callable[..., None] | None = None) -> dict[str, Any] | None:  # by the launcher
    """Run the tasks as one process; rank 0 returns the results."""
    from mplug.commands import among, launched

    run, sampler = prepared(job)
    with among(launched(), run):
        return results_of(run, sampler, job)


def prepared(job: Job) -> "tuple[Run, Sampler]":
    """The run, which scores and samples instead of training."""
    from mplug.commands import Registry, choose_device, resolve
    from mplug_sampling import Sampler, sampling_run

    sampler = Sampler(padded=True)
    run = sampling_run(resolve(Registry(), job.base, job.overrides), sampler)
    run.device = choose_device(run.config)
    return run, sampler


def results_of(run: "Run", sampler: "Sampler", job: Job) -> dict[str, Any] | None:
    """The results of the tasks on rank 0 of a prepared run; None on the others. Collective."""
    from mplug.commands import allocate_parts
    from mplug_lm_eval.engine import Engine
    from mplug_lm_eval.harness import run_tasks
    from mplug_lm_eval.tokens import Tokens

    job.weights.load(run, allocate_parts)
    tokens = Tokens.of_folder(job.weights.path) if job.weights.is_published else Tokens.of_run(run)
    length = min(job.wanted.max_length or run.config.trainer.seq_length, run.config.trainer.seq_length)
    engine = Engine(run, sampler, tokens, length, job.wanted.batch_size)
    if run.rank:
        engine.follow()
        return None
    try:
        return run_tasks(job.wanted, engine)
    finally:
        engine.finish()
