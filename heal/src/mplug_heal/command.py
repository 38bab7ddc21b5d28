"""mplug runs relayout."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mplug.cli.options import Finite
from mplug.errors import UsageError
from mplug_heal.requests import answer_to, ask, is_asked, withdraw

if TYPE_CHECKING:
    from mplug_heal.requests import Answer, Request

POLL = 0.2
"""Seconds between two looks at the answer."""


@click.command("relayout")
@click.argument("run")
@click.option("--parallel", "layout", required=True, metavar="WORD", help="The new layout, such as tp2dp4.")
@click.option(
    "--timeout",
    type=Finite(0, 1e7, min_open=True),
    default=600.0,
    show_default=True,
    help="Withdraw the request if the run has not begun to serve it after this many seconds.",
)
def relayout(run: str, layout: str, timeout: float) -> None:
    """Change the layout of a run while it trains.

    RUN is the name of a run that trains now, or the path of its folder. After its current step, its processes build the
    new layout, and send each other the parts of parameters and optimizer states. They write no checkpoint for it. The
    losses are those of a run that did not change. If the new layout does not fit, the run goes on under the old one.

    \b
    mplug runs relayout gpt-small --parallel tp2dp4
    """
    from mplug.run.folder import directory_at
    from mplug_saving.summary import summary_of

    directory = directory_at(run)
    state = summary_of(directory).state
    if state != "running":
        raise UsageError(
            f"the run '{directory.name}' does not train now (it is {state}); continue it under another layout with: "
            f"mplug train --resume --name {directory.name} --parallel {layout}"
        )
    request = ask(directory, layout)
    with _withdrawing(directory):
        answer = _answer(directory, request, timeout)
    if answer.outcome == "refused":
        raise UsageError(f"the run '{directory.name}' goes on under its layout: {answer.sentence}")
    click.echo(answer.sentence)


@contextmanager
def _withdrawing(directory: Path) -> Iterator[None]:
    """Withdraw the request if the block fails, also by Ctrl-C."""
    try:
        yield
    except BaseException:
        withdraw(directory)
        raise


def _answer(directory: Path, request: "Request", timeout: float) -> "Answer":
    """Wait for the answer of the run. UsageError if it ends before, or does not begin to serve the request in time."""
    from mplug_saving.lock import is_held

    began = time.monotonic()
    while True:
        runs = is_held(directory)
        answer = answer_to(directory, request)
        if answer is not None:
            return answer
        if not runs:
            raise UsageError(f"the run '{directory.name}' ended before it changed its layout")
        if is_asked(directory) and time.monotonic() - began > timeout:
            raise UsageError(
                f"the run '{directory.name}' has not ended its current step in {timeout:g} s (--timeout); the request "
                f"is withdrawn"
            )
        time.sleep(POLL)
