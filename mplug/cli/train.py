"""mplug train."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mplug.cli.beginning import (
    beginning,
    changes_of,
    claim_existing,
    claim_new,
    newest_of,
    readable_after,
    readable_of,
    saved_since,
)
from mplug.cli.options import Finite, RunName, config_options, overrides
from mplug.errors import Diverged, RunError, UsageError

if TYPE_CHECKING:
    from mplug.checkpoint.choice import Choice
    from mplug.distributed.world import World
    from mplug.run.run import Run
    from mplug.training.job import Job, Outcome

PORT = click.IntRange(1, 65535)


@click.command()
@config_options
@click.option("--name", type=RunName(), help="Name of the run; its folder is runs/NAME.")
@click.option("--master-port", type=PORT, help="Port for the processes that this command starts; default: a free one.")
@click.option("--resume", is_flag=True, help="Continue the newest valid checkpoint of --name, or of the newest run.")
@click.option(
    "--allow-change",
    "allowed",
    metavar="FIELDS",
    multiple=True,
    help="With --resume: fields or sections that may differ from the checkpoint's: optimizer.lr,schedule.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0, 10**6),
    default=0,
    help="How often to go on from the newest valid checkpoint when a process dies or hangs (watchdog.timeout).",
)
@click.option("--deterministic", is_flag=True, help="The same run twice gives the same bits, on the same machines.")
@click.option(
    "--max-minutes",
    type=Finite(0, 1e9, min_open=True),
    help="Save and end before so much time; an evaluation is left for it.",
)
def command(
    name: str | None,
    resume: bool,
    allowed: tuple[str, ...],
    master_port: int | None,
    restarts: int,
    max_minutes: float | None,
    deterministic: bool,
    **options: Any,
) -> None:
    """Train a model, or continue a run.

    Without options, trains a small byte-level GPT on the source text of Python's standard library: nothing is
    downloaded, no GPU is needed. What a run is made of can be seen before it starts with 'mplug explain', and every
    field of its config with 'mplug config show'.

    With --deterministic (trainer.deterministic), kernels that do not give the same bits twice are left out, or refused
    if they are named; what depends on the layout still does, and 'mplug explain' lists it.

    A run of several processes ends when one of them hangs for minutes (watchdog.timeout, in seconds, and longer where
    steps are long); the error names its rank, and what it was doing.

    A resumed run keeps the settings of its checkpoint. It may have more steps, another layout and other kernels, save,
    evaluate and report in another way, and it logs every change. Any other change, such as another learning rate,
    optimizer, seed or data, is refused unless --allow-change names it.

    One command at a time trains a run: a second one of the same name is refused, with the name of the first one's
    process and machine. SIGTERM and Ctrl-C finish the step under way, save, and end the run; they leave an evaluation.

    On several machines, start one process per GPU with srun, torchrun or mpirun; docs/machines.md has the commands.

    \b
    mplug train --set data.path=book.txt --set trainer.steps=500
    mplug train --model gpt --preset 125m --attention reference
    mplug train --parallel tp2pp2 --restarts 3
    mplug train --resume --set trainer.steps=3000
    mplug train --resume --set optimizer.lr=1e-3 --allow-change optimizer.lr
    """
    from mplug.checkpoint.pretrained import pretrained_of, refuse_another_model
    from mplug.config.defaults import default_settings, saved_settings
    from mplug.config.sources import merge, read_assignments
    from mplug.distributed.launch import refuse_port_in_use
    from mplug.distributed.world import launched
    from mplug.run.folder import RUNS, find_directory, new_directory
    from mplug.run.lock import Lock
    from mplug.run.metrics_file import METRICS, read_lines
    from mplug.training.job import Job, settle

    began = time.time()
    world = launched()
    restarted = world is not None and world.restart > 0
    if world is not None:
        _refuse_restarts(world, restarts, name, resume)
        _refuse_port(world, master_port)
    names = tuple(name.strip() for words in allowed for name in words.split(","))
    if names and not resume:
        raise UsageError("--allow-change is for a run that goes on from a checkpoint; add --resume, or leave it out")
    resume = resume or (restarted and (RUNS / str(name) / "config.yaml").is_file())
    directory = find_directory(name) if resume else None
    first = world is None or world.rank == 0
    lock = click.get_current_context().with_resource(Lock(_say))
    claim = claim_existing(lock, directory, name) if first else None
    base, changes = saved_settings(directory) if directory else default_settings(), overrides(**options)
    if deterministic:
        changes = merge(changes, read_assignments(["trainer.deterministic=true"], "--deterministic"))
    run, changes = settle(base, changes, world)
    if master_port is not None:
        refuse_port_in_use(master_port)
    resume_from = newest_of(directory, restarted) if directory else None
    if directory is not None and first:
        read_lines(directory / METRICS)  # refuses a damaged file, which the first rank alone writes
    looks = world is None or world.local_rank == 0  # thousands of ranks would read the same manifest
    readable = readable_of(resume_from) if looks else None
    since = changes_of(run, readable, names)
    from mplug.checkpoint.states import refuse_unsavable_states  # import torch, which a refused config never waits for
    from mplug.model.build import build_model
    from mplug.model.sizes import refuse_beyond_memory
    from mplug.training.changes import refuse_other_micro_batches

    run.directory = directory or new_directory(run.config, name, check=first)
    model = build_model(run)  # refuses what cannot be built before any process starts
    refuse_beyond_memory(run, model, world)
    refuse_other_micro_batches(model, since)
    refuse_unsavable_states(run, model, readable.path if readable else None)
    pretrained = pretrained_of(run) if looks and not resume_from else None
    if pretrained is not None:
        refuse_another_model(pretrained, model)
    if first:
        claim = claim or claim_new(lock, run, name)
        _announce(run, world, beginning(readable, pretrained), since.lines())
    deadline = began + 60 * max_minutes if max_minutes is not None else None
    job = Job(base, changes, run.directory, resume_from, deadline, names, claim)
    outcome = _work(run, job, readable, world is not None, master_port, restarts)
    if first:
        _report(outcome, run, time.time() - began)
    if outcome.signal is not None:
        raise SystemExit(128 + outcome.signal)


def _say(sentence: str) -> None:
    click.echo(f"mplug: {sentence}", err=True)


def _refuse_restarts(world: "World", restarts: int, name: str | None, resume: bool) -> None:
    """Refuse --restarts under a launcher, which has its own option, and a restartable run that has no name."""
    if restarts:
        raise UsageError(f"--restarts is for processes that this command starts; {world.launcher} has its own option")
    if world.may_restart and name is None and not resume:
        raise UsageError(f"give --name, so that a process which {world.launcher} restarts finds its run")


def _refuse_port(world: "World", port: int | None) -> None:
    """Refuse --master-port under a launcher: all of its processes must use one port."""
    if port is not None:
        remedy = "it has an option of the same name" if world.launcher == "torchrun" else "set MASTER_PORT instead"
        raise UsageError(f"--master-port is for processes that this command starts; for {world.launcher}, {remedy}")


def _work(
    run: "Run", job: "Job", readable: "Choice | None", launched: bool, port: int | None, restarts: int
) -> "Outcome":
    from mplug.checkpoint.folder import complete
    from mplug.checkpoint.pretrained import pretrained_of
    from mplug.distributed.launch import Stopped, launch
    from mplug.training.job import Outcome, work

    if launched or (run.mesh.world_size == 1 and not restarts):
        return work(job)
    for restart in range(1, restarts + 2):
        try:
            outcome: Outcome = launch(run.mesh.world_size, work, job, port=port)
            return outcome
        except Stopped as stop:
            return Outcome(job.directory, saved_since(run, readable), signal=stop.signal)
        except Diverged:
            raise
        except RunError as error:
            if restart > restarts:
                raise
            if job.claim is not None:
                job.claim.confirm()
            found = complete(run.checkpoints)
            job = replace(job, resume_from=found[-1] if found else None)
            readable = readable_after(error, run, job.resume_from)
            where = beginning(readable, pretrained_of(run) if readable is None else None)
            click.echo(f"mplug: {error}; going on {where} (restart {restart} of {restarts})", err=True)
    raise AssertionError("the last attempt returns or raises")


def _announce(run: "Run", world: "World | None", where: str, changes: list[str]) -> None:
    import torch

    layout = f", {run.config.parallel.layout} on {run.mesh.world_size} processes" if run.mesh.world_size > 1 else ""
    steps = run.config.trainer.steps
    click.echo(f"run {run.directory}: {steps} step{'s' * (steps != 1)}, {where}{layout}")
    for line in changes:
        click.echo(f"  changed since the checkpoint: {line}")
    if run.config.trainer.device != "cpu" and world is None:  # a launcher has decided otherwise how many there are
        click.echo(_idle_gpus(run, torch.cuda.device_count()), nl=False)


def _idle_gpus(run: "Run", gpus: int) -> str:
    """How to use the GPUs that a run leaves idle; nothing where none is idle."""
    if gpus <= run.mesh.world_size:
        return ""
    data = run.config.parallel.data
    remedy = f"--parallel {data}{gpus} uses all" if data else "a parallel strategy is a plugin; none is set to use them"
    return f"{gpus} GPUs are here, and this run uses {run.mesh.world_size}: {remedy}\n"


def _report(outcome: "Outcome", run: "Run", seconds: float) -> None:
    from mplug.training.observers import duration

    name = outcome.directory.name
    if outcome.signal is not None and outcome.step == 0:
        click.echo("stopped before a step was saved")
        return
    if outcome.signal is not None or outcome.out_of_time:
        why = "out of time" if outcome.out_of_time else "stopped"
        rest = f"continue with: mplug train --resume --name {name}"
        if outcome.step == run.config.trainer.steps:
            rest = "it was the last, and its evaluation was left out"
        click.echo(f"{why} after step {outcome.step}, which is saved; {rest}")
        return
    loss = f", validation loss {outcome.val_loss:.4f}" if outcome.val_loss is not None else ""
    speaks = run.hooks.implementers("build_tokenizer")
    sample = f"; sample from it with: mplug generate --name {name}" if speaks else ""
    click.echo(f"done in {duration(seconds)}{loss}{sample}")
