"""The host's own observer, which writes metrics.jsonl. It uses the same hooks as third parties."""

import json
import math
from typing import IO

from mplug.contracts.stepper import Record
from mplug.registry.implementation import hookimpl
from mplug.run.metrics_file import METRICS, read_lines
from mplug.run.run import Run
from mplug.system.files import write_whole


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
