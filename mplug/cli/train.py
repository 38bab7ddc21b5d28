"""mplug train."""

import time
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from mplug.cli.options import Finite, RunName, config_options, overrides
from mplug.cli.train_start import Request, Start, beginning, prepare_start
from mplug.errors import Diverged, RunError, UsageError
from mplug.registry.asking import asking
from mplug.registry.beginnings import beginnings
from mplug.registry.entry_points import SUGGESTIONS, Registry
from mplug.registry.provided import needed, provided

if TYPE_CHECKING:
    from mplug.run.run import Run
    from mplug.training.job import Outcome
    from mplug.training.saving import Saving

PORT = click.IntRange(1, 65535)

HELP = """Train a model, or continue a run.

Without options, the command trains a small byte-level GPT on the source text of Python's standard library. It
downloads nothing and needs no GPU. 'mplug explain' shows the parts of a run before it starts, and 'mplug config
show' shows every field of its config.

With --deterministic (trainer.deterministic), mplug omits kernels that are not repeatable bit for bit, and refuses
them if the config names them. Results can still depend on the layout: 'mplug explain' lists how.

A run of several processes ends when one of them hangs for minutes (longer if steps are long), as long as an
extension of the run watches them. The error names its rank and its last activity.

A resumed run keeps the settings of its checkpoint. You may change the number of steps, the layout, the kernels, and
how the run saves, evaluates and reports; the log lists every change. mplug refuses any other change, such as
another learning rate, optimizer, seed or data, unless --allow-change names it. If all steps are done, the command
says so and ends.

Only one command at a time can train a run. A second command for the same run ends with an error that names the
process and machine of the first. SIGTERM and Ctrl-C complete the current step, save, and end the run; they cancel
an evaluation.

On several machines, start one process per GPU with srun, torchrun or mpirun; docs/machines.md has the commands.

To set a field of the config, use its short option if it has one (--steps 500), an assignment (trainer.steps=500,
also after --set), or a YAML file (FILE.yaml), which the command line overrides.

\b
mplug train --data book.txt --steps 500 --lr 1e-3
mplug train run.yaml trainer.eval_every=100
mplug train --model gpt --preset 125m --kernels reference
mplug train --pretrained Qwen3-8B --adapt lora --data packed --data chats.jsonl
mplug train --parallel tp2pp2 --restarts 3
mplug train --resume --steps 3000
mplug train --resume --lr 1e-3 --allow-change optimizer.lr
"""


@click.command(help=HELP)
@config_options
@click.option("--name", type=RunName(), help="Name of the run. Its folder is runs/NAME.")
@click.option("--master-port", type=PORT, help="Port of the processes that this command starts; default: a free port.")
@click.option(
    "--resume", is_flag=True, help="Continue from the newest valid checkpoint of --name, or of the newest run."
)
@click.option(
    "--allow-change",
    "allowed",
    metavar="FIELDS",
    multiple=True,
    help="With --resume: fields or sections that may differ from the checkpoint: optimizer.lr,schedule.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0, 10**6),
    default=0,
    show_default=True,
    help="Maximum restarts from the newest valid checkpoint after a process dies or hangs.",
)
@click.option("--deterministic", is_flag=True, help="Make the run repeatable bit for bit on the same machines.")
@click.option(
    "--max-minutes",
    type=Finite(0, 1e9, min_open=True),
    help="Save and end the run within this time. An evaluation under way is cancelled.",
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
    """Train a model, or continue a run."""
    from mplug.config.sources import merge, read_assignments
    from mplug.run.launching import launched

    began = time.time()
    changes = overrides(**options)
    if deterministic:
        changes = merge(changes, read_assignments(["trainer.deterministic=true"], "--deterministic"))
    names = tuple(name.strip() for words in allowed for name in words.split(","))
    saving: Saving | None = needed("savers", "--resume", "mplug-saving") if resume else provided("savers")
    lock = nullcontext() if saving is None else saving.lock(_print_notice)
    click.get_current_context().with_resource(lock)
    start = prepare_start(Request(name, resume, names, changes, master_port, restarts), launched(), saving, lock)
    if start.is_first:
        _announce(start)
    outcome = _work(start, began + 60 * max_minutes if max_minutes is not None else None)
    if start.is_first:
        _report(outcome, start.run, time.time() - began)
    if outcome.signal is not None:
        raise SystemExit(128 + outcome.signal)


def _print_notice(message: str) -> None:
    click.echo(f"mplug: {message}", err=True)


def _work(start: Start, deadline: float | None) -> "Outcome":
    """Train in this process, or in processes that are started here, again after a failure if --restarts allows it."""
    from mplug.run.launching import Stopped, launch
    from mplug.training.job import Outcome, supervisor_of, work

    job, run, readable, restarts = start.job(deadline), start.run, start.readable, start.request.restarts
    saving: Saving | None = provided("savers")
    if start.world is not None or (run.mesh.world_size == 1 and not restarts):
        return work(job)
    for restart in range(1, restarts + 2):
        try:
            port, supervisor = start.request.master_port, supervisor_of(run)
            options: dict[str, Any] = {"port": port, "supervisor": supervisor, "healing": start.healing}
            outcome: Outcome = launch(run.mesh.world_size, work, job, **options)
            return outcome
        except Stopped as stop:
            step = 0 if saving is None else saving.saved_since(run, readable)
            return Outcome(job.directory, step, signal=stop.signal)
        except Diverged:
            raise
        except RunError as error:
            if restart > restarts:
                raise
            if job.claim is not None:
                job.claim.confirm()
            if saving is not None:
                job = replace(job, resume_from=saving.newest(job.directory, restarted=True))
                readable = saving.readable_after(error, run, job.resume_from)
            is_anew = readable is None and run.config.checkpoint.pretrained is not None
            where = beginning(readable, beginnings().source(run) if is_anew else None, run)
            click.echo(f"mplug: {error}; continuing {where} (restart {restart} of {restarts})", err=True)
    raise AssertionError("the last attempt returns or raises")


def _announce(start: Start) -> None:
    for line in start.lines():
        click.echo(line)


def _report(outcome: "Outcome", run: "Run", seconds: float) -> None:
    from mplug.run.durations import duration

    name = outcome.directory.name
    if outcome.nothing_left:
        click.echo(
            f"nothing is left to do: all {outcome.step} steps of run '{name}' are done and saved; to train longer: "
            f"mplug train --resume --name {name} --set trainer.steps=N"
        )
        return
    if outcome.signal is not None and outcome.step == 0:
        click.echo("stopped before a checkpoint was saved")
        return
    if outcome.signal is not None or outcome.out_of_time:
        reason = "out of time" if outcome.out_of_time else "stopped"
        rest = f"continue with: mplug train --resume --name {name}"
        if outcome.step == run.config.trainer.steps:
            rest = "it was the last step, and its evaluation was cancelled"
        saved = provided("savers") is not None
        click.echo(f"{reason} after step {outcome.step}{f', which is saved; {rest}' if saved else ''}")
        return
    loss = f", validation loss {outcome.val_loss:.4f}" if outcome.val_loss is not None else ""
    click.echo("; ".join((f"done in {duration(seconds)}{loss}", *_suggestions(run))))


def _suggestions(run: "Run") -> list[str]:
    """What a plugin of the run suggests to do with it (its attribute `suggestion`), or else installed packages.

    A faulty package does not end the command.
    """
    found = [str(one.plugin.suggestion) for one in run.config.chosen if hasattr(one.plugin, "suggestion")]
    if found and run.directory is not None:
        return [text.format(name=run.directory.name) for text in found if text]
    for entry in Registry.of_process().table(SUGGESTIONS):
        module, _, attribute = entry.target.partition(":")
        try:
            with asking(f"the suggestion '{entry.name}' ({entry.origin})", entry.target):
                found.append(getattr(import_module(module), attribute)(run))
        except UsageError as error:
            _print_notice(str(error))
    return [clause for clause in found if clause]
