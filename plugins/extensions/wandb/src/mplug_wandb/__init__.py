"""The metrics of a run for Weights & Biases, written by its own library."""

import os
import secrets
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import Record, UsageError, hookimpl, scalars, write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from mplug import Run

FOLDER = "wandb"
"""The folder of wandb's files below the folder that it gets."""
ID = "run_id"
"""The file with the id of the run at Weights & Biases, in `FOLDER` of the run's own folder."""


class WeightsAndBiases:
    """Writes every number of metrics.jsonl as a metric, on rank 0.

    A resumed run continues the run of the same id. If the library fails, the host reports it once, and the run goes on
    without it.
    """

    class Config(BaseModel):
        """Where to write, and under which names."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        project: str | None = Field(
            None, min_length=1, description="project; null: that of the variable WANDB_PROJECT, or 'mplug'"
        )
        run_name: str | None = Field(None, min_length=1, description="name of the run; null: the name of its folder")
        entity: str | None = Field(None, min_length=1, description="user or team; null: the default of your account")
        group: str | None = Field(None, min_length=1, description="group of runs to which this one belongs")
        tags: tuple[str, ...] = Field((), description="tags of the run")
        notes: str | None = Field(None, description="description of the run")
        mode: Literal["online", "offline", "disabled"] | None = Field(
            None,
            description="'offline' writes files only, for 'wandb sync'; 'disabled' writes nothing; null: the variable "
            "WANDB_MODE, or 'online'",
        )
        every: PositiveInt = Field(1, description="write every n-th step; steps with an evaluation are always written")
        statistics: bool = Field(True, description="also write the statistics of modules, such as the load of experts")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.run: Any = None

    @hookimpl
    def configure(self) -> None:
        """Refuse a run if the library is not installed: an observer that fails later does not end it."""
        if find_spec("wandb") is None:
            raise UsageError("extensions.wandb needs the package 'wandb'; pip install wandb")

    @hookimpl
    def run_started(self, run: "Run") -> None:
        """Begin the run at Weights & Biases, or continue it."""
        if run.rank != 0 or run.directory is None or self._mode == "disabled":
            return
        if self._mode == "offline":  # the library would send reports of its own errors
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        own = self.config
        self.run = wandb.init(
            project=own.project or os.environ.get("WANDB_PROJECT") or "mplug",
            entity=own.entity,
            name=own.run_name or run.directory.name,
            group=own.group,
            tags=own.tags or None,
            notes=own.notes,
            mode=self._mode,
            id=_identity(run.directory),
            resume="allow" if self._mode == "online" else None,  # offline, 'wandb sync' continues a run of the same id
            dir=str(run.directory),
            config=run.config.resolved(),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),  # the run's own logs have what it prints
        )

    @property
    def _mode(self) -> str:
        return self.config.mode or os.environ.get("WANDB_MODE") or "online"

    @hookimpl
    def step_finished(self, record: Record) -> None:
        """Write the step's numbers."""
        step = record["step"]
        if self.run is None or (step % self.config.every and "val_loss" not in record):
            return
        left_out = {"step"} if self.config.statistics else {"step", "statistics"}
        numbers = dict(scalars({name: value for name, value in record.items() if name not in left_out}))
        try:
            self.run.log(numbers, step=step)
        except Exception:
            self.run = None  # the host reports the error; it would be the same in every step
            raise

    @hookimpl
    def run_finished(self) -> None:
        """End the run."""
        self._finish(0)

    @hookimpl
    def run_failed(self) -> None:
        """End the run as one that failed."""
        self._finish(1)

    def _finish(self, status: int) -> None:
        if self.run is None:
            return
        import wandb

        run, self.run = self.run, None
        try:
            run.finish(exit_code=status)
        finally:
            wandb.teardown()  # ends the library's process


def _identity(directory: "Path") -> str:
    """The id of the run at Weights & Biases: the same one whenever the run resumes."""
    path = directory / FOLDER / ID
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(exist_ok=True)
    identity = f"{secrets.randbelow(10**12):012d}"
    write_whole(path, f"{identity}\n")
    return identity
