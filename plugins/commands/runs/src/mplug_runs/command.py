"""mplug runs."""

import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from mplug.commands import OpenGroup

if TYPE_CHECKING:
    from mplug_saving import RunSummary

HEADER = ("RUN", "STATE", "STEP", "LOSS", "VAL LOSS", "TOKENS/S", "STARTED", "MODEL", "LAYOUT")
MISSING = "-"


class RunCommands(OpenGroup):
    """The commands of `mplug runs`; other distributions add more by entry points 'runs.NAME'."""

    path = ("runs",)


@click.group(cls=RunCommands)
def command() -> None:
    """Commands on the runs of this folder.

    \b
    mplug runs list
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array with all fields instead of a table.")
def list_(as_json: bool) -> None:
    """List the runs below 'runs', the latest start last.

    The state is 'running', 'done' (all steps), 'stopped' (by a signal or a time limit, and saved) or 'failed' (by an
    error, or killed). LOSS is that of the last step, VAL LOSS the last one, and TOKENS/S the median of the last 50
    steps. STARTED is the last start; a resumed run has several.
    """
    from mplug.commands import all_directories, table
    from mplug_saving import summary_of

    runs = sorted(map(summary_of, all_directories()), key=_time)
    for run in runs:
        if run.problem:
            click.echo(f"mplug: {run.problem}", err=True)
    if as_json:
        click.echo(json.dumps([asdict(run) for run in runs], indent=2))
    elif runs:
        click.echo(table(HEADER, map(_row, runs)))
    else:
        click.echo("there is no run in 'runs'; start one with 'mplug train'")


def _time(run: "RunSummary") -> tuple[float, str]:
    return _started(run).timestamp() if run.started else 0.0, run.name


def _started(run: "RunSummary") -> datetime:
    return datetime.fromisoformat(str(run.started))


def _row(run: "RunSummary") -> tuple[str, ...]:
    of = f"/{run.steps}" if run.steps is not None else ""
    return (
        run.name,
        run.state,
        f"{run.step}{of}",
        _number(run.loss, ".4f"),
        _number(run.val_loss, ".4f"),
        _number(run.tokens_per_s, ",.0f"),
        f"{_started(run):%Y-%m-%d %H:%M}" if run.started else MISSING,
        " ".join(filter(None, (run.model, run.preset))) or MISSING,
        run.layout or MISSING,
    )


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)
