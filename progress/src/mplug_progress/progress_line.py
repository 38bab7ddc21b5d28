"""The progress of a run on the console: a line every few steps, and a bar on terminals."""

import logging
import statistics
import time
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from mplug.contracts.stepper import Record
from mplug.registry.implementation import hookimpl
from mplug.run.durations import LONG_RUN, TRIAL, duration
from mplug.run.run import Run

log = logging.getLogger("mplug")

RECENT = 50
"""Steps over which the remaining time takes the usual duration of a step."""


class TimeRemaining:
    """The remaining time of a run, by the median duration of its recent steps and by its evaluations and saves.

    The first step of a process may compile kernels, and says nothing about those that follow.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._last = 0.0
        self._steps, self._pauses = -1, 0.0

    def begin(self, now: float) -> None:
        """Start the clock; times are in seconds."""
        self._last = now

    def step(self, now: float, steps_left: int, has_paused: bool = False) -> float | None:
        """The seconds left after a step that ended now; None as long as no step says it.

        `has_paused` says that an evaluation or a save has added to the duration of this step.
        """
        took, self._last = now - self._last, now
        self._steps += 1
        if self._steps == 0:
            return None if steps_left else 0.0
        usual = statistics.median(self._recent or [took])
        if has_paused:
            self._pauses += max(0.0, took - usual)
        else:
            self._recent.append(took)
            usual = statistics.median(self._recent)
        return steps_left * (usual + self._pauses / self._steps)


SLOW_STEP = 2.0
"""Seconds after which the bar also shows the micro batches of a step."""
LONG_STEP = 20.0
"""Estimated seconds of a step that are printed before the first step is over."""
SILENCE = 60.0
"""Seconds after which a step has a line whatever its number is."""


class ProgressLine:
    """Prints a line every `log_every` steps, and at least one a minute.

    On a terminal it also shows a bar that moves with every step, and with every micro batch of slow steps. If the first
    micro batch of a process shows that steps will be long, it prints an estimate.
    """

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
        self.remaining = TimeRemaining()
        self.has_saved = False
        self.printed_at = self.step_began = time.monotonic()
        self.knows_duration = False

    @hookimpl
    def run_started(self, run: Run) -> None:
        """Print the parts of the run that depend on the layout, if there are any, and show the bar."""
        if run.depends_on_layout:
            line = f"depends on the layout: {'; '.join(run.depends_on_layout)}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            log.info(line)
        self.remaining.begin(time.monotonic())
        self.task = self.bar.add_task("", total=self.total_steps, completed=run.step)
        self.bar.start()

    @hookimpl
    def micro_batch_began(self, run: Run, number: int, count: int) -> None:
        """Show the micro batches of a slow step; estimate the duration of long steps by the first micro batch."""
        now = time.monotonic()
        if number == 0:
            self.step_began = now
        took = now - self.step_began
        if number == 1 and not self.knows_duration and took * count >= LONG_STEP and _is_in_order(run):
            self._print(estimate_line(took, count, self.total_steps - run.step + 1))
        if took >= SLOW_STEP and self.task is not None:
            words = f"{run.step}/{self.total_steps}  micro batch {number + 1} of {count}  {duration(took)}"
            self.bar.update(self.task, completed=run.step - 1 + number / max(count, number + 1), description=words)

    @hookimpl
    def step_finished(self, record: Record) -> None:
        """Move the bar; print a line every `log_every` steps and for evaluated, skipped, first and last steps."""
        self.knows_duration = True
        step, notable = record["step"], "val_loss" in record or record["skipped"]
        has_paused, self.has_saved = self.has_saved or "val_loss" in record, False
        left = self.remaining.step(time.monotonic(), self.total_steps - step, has_paused)
        line = step_line(record, self.total_steps, left)
        assert self.task is not None
        self.bar.update(self.task, completed=step, description=short_line(record, self.total_steps, left))
        silent = time.monotonic() - self.printed_at >= SILENCE
        if notable or silent or step % self.log_every == 0 or step in (1, self.total_steps):
            self._print(line)

    @hookimpl
    def checkpoint_saved(self, path: Path) -> None:
        """Log the path of the checkpoint."""
        self.has_saved = True
        log.info("saved %s", path)

    @hookimpl
    def run_finished(self) -> None:
        """Remove the bar."""
        self.bar.stop()

    @hookimpl
    def run_failed(self) -> None:
        """Remove the bar."""
        self.bar.stop()

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)
        log.info(line)
        self.printed_at = time.monotonic()


def _is_in_order(run: Run) -> bool:
    """Whether a micro batch is computed when the next one begins: on a CPU, and without a pipeline."""
    return run.device == "cpu" and not any("units" in axis.activations for axis in run.mesh.views["dense"])


def estimate_line(seconds: float, count: int, steps: int) -> str:
    """The durations of a step of `count` micro batches and of the run, by those of the first micro batch."""
    step, run = seconds * count, seconds * count * steps
    return (
        f"the first of {count} micro batches took {duration(seconds)}: about {duration(step)} per step, "
        f"{duration(run)} for {steps:,} step{'s' * (steps != 1)}{f'; {TRIAL}' if run >= LONG_RUN else ''}"
    )


def step_line(record: Record, total_steps: int, seconds_left: float | None) -> str:
    """One step as a line of text."""
    parts = [
        f"step {record['step']:>{len(str(total_steps))}}/{total_steps}",
        f"loss {record['loss']:.4f}",
        f"reward {record['reward']:.3f}" if "reward" in record else "",
        f"grad norm {record['grad_norm']:.2f}",
        f"lr {record['lr']:.2e}",
        f"{record['tokens_per_s']:,.0f} tokens/s{_targets(record)}",
        f"{record['tflops']:.3g} TFLOP/s",
        f"MFU {record['mfu']:.1%}" if record["mfu"] is not None else "",
        f"{record['memory_gib']:.2f} GiB",
        f"val loss {record['val_loss']:.4f}" if "val_loss" in record else "",
        "skipped" if record["skipped"] else "",
        _left(seconds_left),
    ]
    return "  ".join(part for part in parts if part)


def short_line(record: Record, total_steps: int, seconds_left: float | None) -> str:
    """A short form of `step_line` for use next to a bar: both fit on a terminal of 80 columns."""
    return "  ".join(
        part
        for part in (
            f"{record['step']:>{len(str(total_steps))}}/{total_steps}",
            f"loss {record['loss']:.4f}",
            f"{record['tokens_per_s']:,.0f} tokens/s",
            _left(seconds_left),
        )
        if part
    )


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{duration(seconds)} left"


def _targets(record: Record) -> str:
    """The targets per second, if a part of the tokens is no target: prompts, and unfilled rests of samples."""
    targets, tokens = record["targets_per_s"], record["tokens_per_s"]
    return "" if targets > 0.999 * tokens else f" ({targets:,.0f} targets/s)"
