"""Output of the commands: a progress bar, tables, and the summary."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mplug_indexed.preprocess.job import Job, Outcome, Progress

NAMED = 5
"""Maximum number of bad lines shown; the report beside the data names more."""


@contextmanager
def progress_of(total: int) -> "Iterator[Progress]":
    """A bar over the bytes of the inputs, with documents and tokens per second; hidden without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    parts = (
        TextColumn("[progress.percentage]{task.percentage:>3.0f}%"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*parts, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total, rate="")
        began: list[int] = []

        def show(outcome: "Outcome", done: int) -> None:
            began.append(outcome.tokens)
            elapsed = bar.tasks[0].elapsed or 0.0
            speed = (outcome.tokens - began[0]) / elapsed if elapsed > 1 else 0.0
            rate = f"{outcome.documents:,} documents" + (f", {speed:,.0f} tokens/s" if speed else "")
            bar.update(task, completed=done, rate=rate)

        yield show


def summary(job: "Job", outcome: "Outcome", seconds: float) -> Iterator[str]:
    """The lines of the summary: the written files, the skipped documents, and the next commands."""
    from mplug_indexed.format import dtype_for

    record = job.tokenizer
    yield (
        f"wrote {job.prefix}.bin and {job.prefix}.idx: {outcome.documents:,} documents, {outcome.tokens:,} tokens "
        f"({dtype_for(record.vocab_size).name}), tokenizer {record.name} with {record.vocab_size:,} tokens, "
        f"in {seconds:,.1f} s"
    )
    if record.eod is not None and not job.append_eod:
        yield f"documents have no end-of-document token; --append-eod appends the tokenizer's, {record.eod}, to each"
    if outcome.resumed:
        yield f"continued an earlier run, which had completed {outcome.resumed} part{'s' * (outcome.resumed != 1)}"
    if outcome.empty:
        yield f"skipped {outcome.empty:,} empty documents"
    if outcome.num_bad:
        yield f"skipped {outcome.num_bad:,} invalid documents:"
        yield from (f"  {sentence}" for sentence in outcome.bad[:NAMED])
        if outcome.num_bad > NAMED:
            yield f"  ... (more in {job.prefix}.preprocess.json)"
    yield f"inspect it: mplug data inspect {quote(str(job.prefix))}"
    yield f"train on it: {training(job.prefix, record.vocab_size)}"


def training(prefix: Path, vocab_size: int) -> str:
    """The command that trains on a corpus."""
    return f"mplug train --data indexed --set {quote(f'data.path={prefix}')} --set model.vocab_size={vocab_size}"


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table, the same on a terminal and in a pipe; numbers are right-aligned."""
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
