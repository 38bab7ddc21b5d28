"""mplug train."""

from typing import TYPE_CHECKING, Any

import click

from mplug.cli.options import RunName, config_options, overrides

if TYPE_CHECKING:
    from pathlib import Path

    from mplug.config import RunConfig
    from mplug.run import Run


@click.command()
@config_options
@click.option("--name", type=RunName(), help="Name of the run; its folder is runs/NAME.")
@click.option("--resume", is_flag=True, help="Continue the newest checkpoint of --name, or of the newest run.")
def command(name: str | None, resume: bool, **options: Any) -> None:
    """Train a model, or continue a run.

    Without options, trains a small byte-level GPT on the source text of Python's standard library: nothing is
    downloaded, no GPU is needed. What a run is made of can be seen before it starts with 'mplug explain', and every
    field of its config with 'mplug config show'.

    \b
    mplug train --set data.path=book.txt --set trainer.steps=500
    mplug train --model gpt --preset 125m --attention reference
    mplug train --resume --set trainer.steps=3000
    """
    from mplug.registry import Registry
    from mplug.resolve import default_settings, resolve
    from mplug.run import find_directory, new_directory, prepare
    from mplug.settings import read_file

    directory = find_directory(name) if resume else None
    base = read_file(directory / "config.yaml") if directory else default_settings()
    config = resolve(Registry(), base, overrides(**options))
    console, observers = _host_observers(config)
    run = prepare(config, observers)
    _refuse_more_than_one_process(run)
    resume_from = _newest_checkpoint(directory) if directory else None
    run.directory = directory or new_directory(config, name)
    _train(run, resume_from, console)


def _newest_checkpoint(directory: "Path") -> "Path":
    from mplug.checkpoint import newest  # imports torch, which a refused config never waits for

    return newest(directory / "checkpoints")


def _host_observers(config: "RunConfig") -> tuple[Any, dict[str, object]]:
    from rich.console import Console

    from mplug.hooks import HOST
    from mplug.observers import MetricsFile, ProgressLine

    console = Console()
    progress = ProgressLine(console, config.trainer.steps, config.trainer.log_every)
    return console, {f"{HOST}metrics": MetricsFile(), f"{HOST}progress": progress}


def _refuse_more_than_one_process(run: "Run") -> None:
    from mplug.errors import UsageError

    if run.mesh.world_size > 1:
        raise UsageError(
            f"layout '{run.config.parallel.layout}' needs {run.mesh.world_size} processes, and this version of mplug "
            f"trains in one; leave --parallel out"
        )


def _train(run: "Run", resume_from: "Path | None", console: Any) -> None:
    import time

    import torch

    from mplug.loop import train
    from mplug.observers import duration

    assert run.directory is not None
    where = f"from step {int(resume_from.name.removeprefix('step_'))}" if resume_from else "from scratch"
    console.print(f"run [bold]{run.directory}[/]: {run.config.trainer.steps} steps, {where}", highlight=False)
    if run.config.trainer.device != "cpu":
        console.print(_idle_gpus(run, torch.cuda.device_count()), highlight=False, end="")
    name, began = run.directory.name, time.monotonic()
    outcome = train(run, resume_from)
    took = duration(time.monotonic() - began)
    if outcome.signal is not None:
        click.echo(f"stopped after step {run.step}, which is saved; continue with: mplug train --resume --name {name}")
        raise SystemExit(128 + outcome.signal)
    loss = f", validation loss {outcome.val_loss:.4f}" if outcome.val_loss is not None else ""
    click.echo(f"done in {took}{loss}; sample from it with: mplug generate --name {name}")


def _idle_gpus(run: "Run", gpus: int) -> str:
    """How to use the GPUs that a run in one process leaves idle; nothing where none is idle."""
    if gpus <= run.mesh.world_size:
        return ""
    data = run.config.parallel.data
    remedy = f"--parallel {data}{gpus} uses all" if data else "a parallel strategy is a plugin; none is set to use them"
    return f"{gpus} GPUs are here, and this run uses {run.mesh.world_size}: {remedy}\n"
