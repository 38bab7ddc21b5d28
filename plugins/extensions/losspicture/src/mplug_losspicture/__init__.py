"""A picture of a run's losses, `loss.svg` in the folder of the run."""

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from mplug import Record, hookimpl, read_records, write_whole
from mplug_losspicture.drawing import MARK, Curve, svg

if TYPE_CHECKING:
    from pathlib import Path

    from mplug import Run

NAME = "loss.svg"
SECONDS_FOR_CHECKPOINTS = 10.0
"""Minimum number of seconds before a drawing for a checkpoint."""


class LossPicture:
    """Draws loss.svg on rank 0: at intervals, for checkpoints, and when the run ends or fails.

    A resumed run continues the picture, from metrics.jsonl. A file loss.svg of another program stays as it is.
    """

    class Config(BaseModel):
        """How often to draw."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        seconds: FiniteFloat = Field(60.0, ge=0, description="minimum number of seconds between two drawings")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path: Path | None = None
        self.training, self.validation = Curve(), Curve()
        self._resumed_at = 0
        """The last step before this process, as long as the steps up to it are not in the curves."""
        self._drawn = 0.0

    @hookimpl
    def run_started(self, run: "Run") -> None:
        """Remember where the run begins. Its earlier steps are read later: the host first checks metrics.jsonl."""
        if run.rank == 0 and run.directory is not None:
            self.path, self._resumed_at, self._drawn = run.directory / NAME, run.step, time.monotonic()

    @hookimpl
    def step_finished(self, record: Record) -> None:
        """Add the step."""
        if self.path is not None:
            self._add_earlier(self.path)
            self._add(record)
            self._draw(self.path, self.config.seconds)

    @hookimpl
    def checkpoint_saved(self) -> None:
        """Draw the steps that the checkpoint holds."""
        self._draw_if_first_rank(min(SECONDS_FOR_CHECKPOINTS, self.config.seconds))

    @hookimpl
    def run_finished(self) -> None:
        """Draw the whole run."""
        self._draw_if_first_rank(0)

    @hookimpl
    def run_failed(self) -> None:
        """Draw the run up to its failure, unless the disk fails too: it may be full, which the run's error reports."""
        with suppress(OSError):
            self._draw_if_first_rank(0)

    def _add_earlier(self, path: "Path") -> None:
        """Add the steps before this process, once."""
        last, self._resumed_at = self._resumed_at, 0
        for record in read_records(path.with_name("metrics.jsonl")) if last else ():
            if record["step"] <= last:
                self._add(record)

    def _add(self, record: Record) -> None:
        self.training.add(record["step"], record.get("loss"))
        self.validation.add(record["step"], record.get("val_loss"))

    def _draw_if_first_rank(self, pause: float) -> None:
        if self.path is not None:
            self._add_earlier(self.path)
            self._draw(self.path, pause)

    def _draw(self, path: "Path", pause: float) -> None:
        """Draw, unless the last drawing was less than `pause` seconds ago."""
        now = time.monotonic()
        if now - self._drawn < pause:
            return
        self._drawn = now
        picture = svg(self.training, self.validation)
        if picture is not None and not _is_foreign(path):
            write_whole(path, picture)


def _is_foreign(picture: "Path") -> bool:
    """Whether another program has drawn the picture that is there."""
    try:
        with picture.open(encoding="utf-8", errors="replace") as file:
            return MARK not in file.read(1000)
    except FileNotFoundError:
        return False
