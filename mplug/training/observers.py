"""The host's own observers: metrics.jsonl and the progress line. They use the same hooks as third parties."""

import json
import logging
import math
import time
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from mplug.contracts import Record
from mplug.registry.implementation import hookimpl
from mplug.run.metrics_file import METRICS, read_lines
from mplug.run.run import Run
from mplug.system.files import write_whole

log = logging.getLogger("mplug")


class MetricsFile:
    """Writes one line of metrics.jsonl per step, on rank 0. A resumed run first drops the steps that it repeats."""

    _file: IO[str] | None = None

    @hookimpl
    def run_started(self, run: Run) -> None:
        """Open the file, and remove the steps that the run will repeat."""
        if run.rank != 0 or run.directory is None:
            return
        path = run.directory / METRICS
        lines = "".join(f"{line}\n" for step, line in read_lines(path) if step <= run.step).encode()
        if path.exists() and path.read_bytes() != lines:
            write_whole(path, lines)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    @hookimpl
    def step_finished(self, record: Record) -> None:
        """Write the step's line."""
        if self._file is not None:
            self._file.write(json.dumps({name: _finite(value) for name, value in record.items()}) + "\n")

    @hookimpl
    def run_finished(self) -> None:
        """Close the file."""
        self._close()

    @hookimpl
    def run_failed(self) -> None:
        """Close the file."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _finite(value: object) -> object:
    """Replace NaN and infinity by None, because JSON has neither."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ProgressLine:
    """Prints a line every `log_every` steps; on a terminal it also shows a bar that moves with every step."""

    def __init__(self, console: Console, total_steps: int, log_every: int) -> None:
        self.console, self.total_steps, self.log_every = console, total_steps, log_every
        self.bar = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self.task: TaskID | None = None
        self.first_step = 0
        self.mark = 0.0

    @hookimpl
    def run_started(self, run: Run) -> None:
        """Print the parts of the run that depend on the layout, if there are any, and show the bar."""
        if run.depends_on_layout:
            line = f"depends on the layout: {'; '.join(run.depends_on_layout)}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            log.info(line)
        self.first_step, self.mark = run.step, time.monotonic()
        self.task = self.bar.add_task("", total=self.total_steps, completed=run.step)
        self.bar.start()

    @hookimpl
    def step_finished(self, record: Record) -> None:
        """Move the bar; print a line every `log_every` steps and for evaluated, skipped, first and last steps."""
        step, notable = record["step"], "val_loss" in record or record["skipped"]
        left = (time.monotonic() - self.mark) / (step - self.first_step) * (self.total_steps - step)
        line = step_line(record, self.total_steps, left)
        assert self.task is not None
        self.bar.update(self.task, completed=step, description=short_line(record, self.total_steps, left))
        if notable or step % self.log_every == 0 or step in (1, self.total_steps):
            self.console.print(line, highlight=False, soft_wrap=True)
            log.info(line)

    @hookimpl
    def checkpoint_saved(self, path: Path) -> None:
        """Log the path of the checkpoint."""
        log.info("saved %s", path)

    @hookimpl
    def run_finished(self) -> None:
        """Remove the bar."""
        self.bar.stop()

    @hookimpl
    def run_failed(self) -> None:
        """Remove the bar."""
        self.bar.stop()


def step_line(record: Record, total_steps: int, seconds_left: float) -> str:
    """One step as a line of text."""
    parts = [
        f"step {record['step']:>{len(str(total_steps))}}/{total_steps}",
        f"loss {record['loss']:.4f}",
        f"grad norm {record['grad_norm']:.2f}",
        f"lr {record['lr']:.2e}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"{record['tflops']:.3g} TFLOP/s",
        f"MFU {record['mfu']:.1%}" if record["mfu"] is not None else "",
        f"{record['memory_gib']:.2f} GiB",
        f"val loss {record['val_loss']:.4f}" if "val_loss" in record else "",
        "skipped" if record["skipped"] else "",
        f"{duration(seconds_left)} left",
    ]
    return "  ".join(part for part in parts if part)


def short_line(record: Record, total_steps: int, seconds_left: float) -> str:
    """A short form of `step_line` for use next to a bar: both fit on a terminal of 80 columns."""
    return "  ".join(
        (
            f"{record['step']:>{len(str(total_steps))}}/{total_steps}",
            f"loss {record['loss']:.4f}",
            f"{record['tokens_per_s']:,.0f} tokens/s",
            f"{duration(seconds_left)} left",
        )
    )


def duration(seconds: float) -> str:
    """Seconds as a clock shows them: 1:05, 2:03:04."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
