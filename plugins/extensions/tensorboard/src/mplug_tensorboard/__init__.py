"""The metrics of a run for TensorBoard, written by TensorBoard's own library."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from mplug import Record, UsageError, hookimpl, scalars

if TYPE_CHECKING:
    from pathlib import Path

    from torch.utils.tensorboard import SummaryWriter

    from mplug import Run


class TensorBoard:
    """Writes every number of metrics.jsonl as a scalar, on rank 0."""

    class Config(BaseModel):
        """Where to write, and how often."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        folder: str | None = Field(
            None,
            min_length=1,
            description="folder in which each run has a folder with its name; null: 'tensorboard' in the run's folder",
        )
        every: PositiveInt = Field(1, description="write every n-th step; steps with an evaluation are always written")
        flush_seconds: PositiveFloat = Field(30, description="maximum seconds until values are written to the file")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.writer: SummaryWriter | None = None

    @hookimpl
    def configure(self) -> None:
        """Refuse a run if TensorBoard's library is not installed: an observer that fails later does not end it."""
        if find_spec("tensorboard") is None:
            raise UsageError("extensions.tensorboard needs the package 'tensorboard'; pip install tensorboard")

    @hookimpl
    def run_started(self, run: "Run") -> None:
        """Begin a file of events. If the run resumes, TensorBoard drops earlier events of the steps that follow."""
        if run.rank != 0 or run.directory is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(
            log_dir=str(self._folder(run.directory)),
            purge_step=run.step + 1,
            flush_secs=self.config.flush_seconds,
        )

    @hookimpl
    def step_finished(self, record: Record) -> None:
        """Write the step's numbers."""
        step = record["step"]
        if self.writer is None or (step % self.config.every and "val_loss" not in record):
            return
        for name, value in scalars({name: value for name, value in record.items() if name != "step"}):
            self.writer.add_scalar(name, value, global_step=step)

    @hookimpl
    def checkpoint_saved(self) -> None:
        """Write the file up to here, so that it has the steps of the checkpoint."""
        if self.writer is not None:
            self.writer.flush()

    @hookimpl
    def run_finished(self) -> None:
        """Close the file."""
        self._close()

    @hookimpl
    def run_failed(self) -> None:
        """Close the file."""
        self._close()

    def _folder(self, directory: "Path") -> "Path":
        from pathlib import Path

        own = self.config.folder
        return directory / "tensorboard" if own is None else Path(own).expanduser() / directory.name

    def _close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None
