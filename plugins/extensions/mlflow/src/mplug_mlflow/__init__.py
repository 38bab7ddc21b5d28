"""The metrics of a run for MLflow, written by its own library."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from mplug import Record, UsageError, hookimpl, scalars

if TYPE_CHECKING:
    from mplug import Run
    from mplug_mlflow.writer import Writer


class MLflow:
    """Writes every number of metrics.jsonl as a metric, on rank 0.

    A thread writes, so a slow server does not delay a step. A resumed run continues the same run of MLflow. If the
    library or the server fails, the host reports it once, and the run goes on without it.
    """

    class Config(BaseModel):
        """Where to write, and under which names."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        experiment: str = Field("mplug", min_length=1, description="experiment; it is created if there is none")
        run_name: str | None = Field(None, min_length=1, description="name of the run; null: the name of its folder")
        tracking_uri: str | None = Field(
            None,
            min_length=1,
            description="server or store: http://HOST:PORT, sqlite:///FILE; null: that of the variable "
            "MLFLOW_TRACKING_URI, or MLflow's own default",
        )
        tags: dict[str, str] = Field({}, description="tags of the run, by their keys")
        every: PositiveInt = Field(1, description="write every n-th step; steps with an evaluation are always written")
        statistics: bool = Field(True, description="also write the statistics of modules, such as the load of experts")
        end_seconds: PositiveFloat = Field(60, description="maximum seconds that the end of a run waits for the server")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.writer: Writer | None = None

    @hookimpl
    def configure(self) -> None:
        """Refuse a run if the library is not installed: an observer that fails later does not end it."""
        if find_spec("mlflow") is None:
            raise UsageError("extensions.mlflow needs the package 'mlflow'; pip install mlflow")

    @hookimpl
    def run_started(self, run: "Run") -> None:
        """Begin a run of MLflow, or continue it."""
        if run.rank != 0 or run.directory is None:
            return
        from mplug_mlflow.writer import Target, Writer  # imports MLflow

        name, own = self.config.run_name or run.directory.name, self.config
        target = Target(own.tracking_uri, own.experiment, name, own.tags, run.config.resolved())
        self.writer = Writer(target, run.directory)

    @hookimpl
    def step_finished(self, record: Record) -> None:
        """Hand the step's numbers to the thread."""
        step = record["step"]
        if self.writer is None or (step % self.config.every and "val_loss" not in record):
            return
        left_out = {"step"} if self.config.statistics else {"step", "statistics"}
        writer, self.writer = self.writer, None  # if it raises, the run goes on without it
        writer.write(step, dict(scalars({name: value for name, value in record.items() if name not in left_out})))
        self.writer = writer

    @hookimpl
    def run_finished(self) -> None:
        """Write what is left, and end the run of MLflow."""
        self._end("FINISHED")

    @hookimpl
    def run_failed(self) -> None:
        """Write what is left, and end the run of MLflow as one that failed."""
        self._end("FAILED")

    def _end(self, status: str) -> None:
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.end(status, self.config.end_seconds)
