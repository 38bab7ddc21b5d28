"""mplug tally."""

from pathlib import Path

import click

from mplug import UsageError
from nova_tally.metrics import Tally, tally_of


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--runs",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="The folder that holds the runs.",
)
@click.option(
    "--by",
    type=click.Choice(["name", "steps", "tokens", "hours"]),
    default="name",
    show_default=True,
    help="What to sort by; numbers from the greatest down.",
)
def tally(names: tuple[str, ...], folder: Path, by: str) -> None:
    """Tell what runs have had: steps, tokens, hours.

    Of all runs, or of those that are named. Hours are those of the training steps, without evaluations and checkpoints.
    """
    tallies = [tally_of(directory) for directory in directories(folder, names)]
    tallies.sort(key=lambda one: one.name if by == "name" else -getattr(one, by))
    click.echo(table(tallies))


def directories(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The named runs of a folder, or all of them; UsageError where there is none."""
    found = {path.parent.name: path.parent for path in folder.glob("*/metrics.jsonl")}
    if not found:
        raise UsageError(f"there is no run in '{folder}'; name the folder of your runs with --runs")
    for name in names:
        if name not in found:
            raise UsageError(f"there is no run '{name}' in '{folder}' (there: {', '.join(sorted(found))})")
    return [found[name] for name in names or found]


def table(tallies: list[Tally]) -> str:
    """A line a run, and one for all of them where there are several."""
    rows = list(tallies)
    if len(rows) > 1:
        rows.append(Tally("all", *(sum(getattr(one, field) for one in rows) for field in ("steps", "tokens", "hours"))))
    width = max(len(one.name) for one in rows)
    lines = [f"{'RUN':{width}}  {'STEPS':>7}  {'TOKENS':>15}  {'HOURS':>8}"]
    lines += [f"{one.name:{width}}  {one.steps:7,}  {one.tokens:15,}  {one.hours:8,.2f}" for one in rows]
    return "\n".join(lines)
