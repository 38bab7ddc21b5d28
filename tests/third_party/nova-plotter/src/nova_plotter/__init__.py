"""The loss curve of a run as an SVG file."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mplug import Record, hookimpl
from nova_plotter.curve import Points, picture

if TYPE_CHECKING:
    from mplug import Run


class Plotter:
    """Draws on rank 0: every so many steps, when the run ends, and when it fails."""

    class Config(BaseModel):
        """When to draw."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        every: int = Field(100, ge=1, description="steps between two drawings")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path: Path | None = None
        self.training: Points = []
        self.validation: Points = []

    @hookimpl
    def run_started(self, run: "Run") -> None:
        """Take up the curve of the steps that are done, which the run's metrics tell."""
        if run.rank != 0 or run.directory is None:
            return
        self.path = run.directory / "loss.svg"
        for record in records(run.directory / "metrics.jsonl"):
            if record["step"] <= run.step:
                self._add(record)

    @hookimpl
    def step_finished(self, record: Record) -> None:
        """Add a point; now and then draw."""
        if self.path is not None:
            self._add(record)
            if record["step"] % self.config.every == 0:
                self._draw()

    @hookimpl
    def run_finished(self) -> None:
        """Draw the whole curve."""
        self._draw()

    @hookimpl
    def run_failed(self) -> None:
        """Draw the curve up to where it broke off."""
        self._draw()

    def _add(self, record: Record) -> None:
        """Add the points of a step; a loss that is not finite (null, in a file) has no place in a picture."""
        for points, name in ((self.training, "loss"), (self.validation, "val_loss")):
            loss = record.get(name)
            if loss is not None and math.isfinite(loss):
                points.append((record["step"], loss))

    def _draw(self) -> None:
        """Replace the file as a whole: who looks at it meanwhile sees the last picture."""
        if self.path is not None and self.training:
            aside = self.path.with_name(".loss.svg.partial")
            aside.write_text(picture(self.training, self.validation), encoding="utf-8")
            aside.replace(self.path)


def records(path: Path) -> list[Record]:
    """The lines of a metrics.jsonl; none where there is no such file, and not the unfinished last line of a kill."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
