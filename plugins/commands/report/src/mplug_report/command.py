"""mplug report."""

from pathlib import Path

import click

from mplug.commands import RunName


class RunOrFolder(RunName):
    """The name of a run below `runs/`, or the path of a run's folder."""


@click.command()
@click.argument("runs", nargs=-1, type=RunOrFolder(), metavar="[RUN]...")
@click.option(
    "--output",
    default="report.html",
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the page.",
)
def command(runs: tuple[str, ...], output: Path) -> None:
    """Compare runs in an HTML page: curves, the settings that differ, and the last figures.

    The page draws every number of metrics.jsonl over steps, tokens or time, with smoothing: losses, gradient norm,
    learning rate, tokens/s, MFU, memory, the load of experts, pipeline bubbles. It is one file and loads nothing from
    the network. RUN is the name of a run below 'runs', or the path of a run's folder; without RUN, the page shows the
    newest run.

    \b
    mplug report first second
    mplug report /shared/runs/* --output all.html
    """
    from mplug import UsageError, counted, write_whole
    from mplug.commands import directory_at, find_directory
    from mplug_report.page import page_of

    directories = list(map(directory_at, dict.fromkeys(runs))) or [find_directory(None)]
    page, missing = page_of(directories)
    for problem in missing:
        click.echo(f"mplug: {problem}", err=True)
    try:
        write_whole(output, page)
    except OSError as error:
        raise UsageError(f"cannot write --output '{output}': {error.strerror}; use another file") from None
    click.echo(f"wrote {output}: {counted(len(directories), 'run')}; open it in a browser")
