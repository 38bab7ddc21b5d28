"""The recording of consecutive steps by torch's profiler."""

import gzip
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

NOISE = b"USDT:"
"""The beginning of the lines that torch's library prints when it starts and stops; its log level hides errors too."""


class StepTrace:
    """Records the steps in `steps`. The profiler runs during the step before them too, to warm up.

    `enter` is called before the first step of the process and at the beginning of each step.
    """

    def __init__(self, folder: Path, steps: range, rank: int, device: str, stacks: bool, shapes: bool) -> None:
        self.steps, self.rank, self.folder, self.device = steps, rank, folder, device
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.startswith("cuda") else [])]
        self._recorder = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=len(steps), repeat=1),
            on_trace_ready=self._write,
            with_stack=stacks,
            record_shapes=shapes,
            acc_events=True,  # silences a warning of torch
        )
        self._runs, self._last = False, steps[0] - 1
        self._path: Path | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the last step is being recorded."""
        return self._last == self.steps[-1]

    def enter(self, step: int) -> None:
        """Begin step number `step`. The first call has the step before the first one of the process, which may be 0."""
        if step == self.steps[0] - 1 and not self._runs:
            with without_noise():
                self._recorder.start()
            self._runs = True
        elif step in self.steps and self._runs:
            with without_noise():
                self._recorder.step()
            self._last = step

    def end(self) -> Path | None:
        """End the recording; returns the file with the steps that were recorded, or None if there is no such step."""
        if self._runs:
            if self.device.startswith("cuda"):
                torch.cuda.synchronize()  # the device may still compute the last step
            with without_noise():
                self._recorder.stop()
            self._runs = False
        return self._path

    def _write(self, recorder: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        steps = f"{self.steps[0]}" if self._last == self.steps[0] else f"{self.steps[0]}-{self._last}"
        path = self.folder / f"steps_{steps}_rank{self.rank}.json.gz"
        plain = path.with_name(f".{path.stem}")  # torch would compress by way of the system's temporary folder
        try:
            recorder.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target)
        finally:
            plain.unlink(missing_ok=True)
        self._path = path


@contextmanager
def without_noise() -> Iterator[None]:
    """Leave out the lines that begin with `NOISE` of what the block writes to the process's stderr."""
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            written.seek(0)
            kept = b"".join(line for line in written if not line.startswith(NOISE))
            while kept:
                kept = kept[os.write(2, kept) :]
